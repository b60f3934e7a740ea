// Products with packed weights, for Python. On the CPU only.
#include <torch/csrc/stable/library.h>

#include "bindings/op_args.h"
#include "bindings/op_lists.h"
#include "ops/linear.h"

namespace vllm_lite {
namespace {

// packed_weight_bytes refuses a number that is no format.
WeightFormat as_format(int64_t format) { return static_cast<WeightFormat>(format); }

std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

// The bytes of a packed weight [rows, columns].
uint8_t* packed_data(const Tensor& packed, WeightFormat format, int64_t rows, int64_t columns,
                     const char* op) {
  uint8_t* const data = byte_data(packed, op, "packed");
  const int64_t expected = packed_weight_bytes(format, rows, columns);
  VL_CHECK(packed.numel() == expected,
           std::string(op) + ": packed has " + std::to_string(packed.numel()) +
               " bytes, but a weight [" + std::to_string(rows) + ", " + std::to_string(columns) +
               "] of this format " + std::to_string(expected));
  check(reinterpret_cast<uintptr_t>(data) % 64 == 0, op,
        "packed must begin at a multiple of 64 bytes");
  return data;
}

void check_source_dtype(const Tensor& source, WeightFormat format) {
  ScalarType expected = ScalarType::Byte;
  if (format == WeightFormat::kFloat32) expected = ScalarType::Float;
  if (format == WeightFormat::kBFloat16) expected = ScalarType::BFloat16;
  if (format == WeightFormat::kFloat16) expected = ScalarType::Half;
  if (format == WeightFormat::kInt8) expected = ScalarType::Char;
  check(source.scalar_type() == expected, "pack_weight",
        "source must have the format's dtype: float32, bfloat16, float16, int8 or, for GGUF's "
        "blocks, uint8");
}

int64_t packed_bytes(int64_t format, int64_t rows, int64_t columns) {
  return packed_weight_bytes(as_format(format), rows, columns);
}

void pack_weight(Tensor packed, Tensor source, int64_t format, int64_t rows, int64_t columns,
                 int64_t first_row, OptionalTensor scales) {
  constexpr const char* kOp = "pack_weight";
  PackWeightParams params{};
  params.format = as_format(format);
  params.packed = packed_data(packed, params.format, rows, columns, kOp);
  check_source_dtype(source, params.format);
  const int64_t row_bytes = source_row_bytes(params.format, columns);
  const int64_t element_bytes = static_cast<int64_t>(source.element_size());
  VL_CHECK(
      source.dim() == 2 && source.is_contiguous() && source.size(1) * element_bytes == row_bytes,
      "pack_weight: source is " + shape_of(source) + ", must be contiguous [num_rows, " +
          std::to_string(row_bytes / element_bytes) + "]");
  params.source = source.const_data_ptr();
  params.num_rows = source.size(0);
  params.scales = float_data(scales, kOp, "scales");
  VL_CHECK(!scales || scales->numel() == params.num_rows,
           "pack_weight: scales has " + std::to_string(scales ? scales->numel() : 0) +
               " elements, must have one for each of the " + std::to_string(params.num_rows) +
               " rows");
  params.rows = rows;
  params.columns = columns;
  params.first_row = first_row;
  pack_weight_cpu(params);
}

void multiply(const char* op, bool is_gated, Tensor out, Tensor input, Tensor packed,
              int64_t format, OptionalTensor bias) {
  VL_CHECK(out.dim() == 2 && input.dim() == 2 && out.size(0) == input.size(0),
           std::string(op) + ": out is " + shape_of(out) + " and input " + shape_of(input) +
               ", must be [num_tokens, rows] and [num_tokens, columns]");
  check((out.stride(1) == 1 || out.size(1) == 1) && (input.stride(1) == 1 || input.size(1) == 1),
        op, "the rows of out and input must be contiguous");
  LinearParams params{};
  params.out = out.mutable_data_ptr();
  params.input = input.const_data_ptr();
  params.format = as_format(format);
  params.num_tokens = out.size(0);
  params.rows = out.size(1);
  params.columns = input.size(1);
  params.out_stride = out.stride(0);
  params.input_stride = input.stride(0);
  params.dtype = float_dtype(input, op);
  params.out_dtype = float_dtype(out, op);
  params.is_gated = is_gated;
  const int64_t weight_rows = is_gated ? 2 * params.rows : params.rows;
  params.packed = packed_data(packed, params.format, weight_rows, params.columns, op);
  if (bias) {
    VL_CHECK(bias->dim() == 1 && bias->size(0) == weight_rows && bias->is_contiguous() &&
                 bias->scalar_type() == out.scalar_type(),
             std::string(op) + ": bias is " + shape_of(*bias) + ", must be contiguous [" +
                 std::to_string(weight_rows) + "] of out's dtype");
    params.bias = bias->const_data_ptr();
  }
  call<linear_cpu>(params);
}

void linear(Tensor out, Tensor input, Tensor packed, int64_t format, OptionalTensor bias) {
  multiply("linear", false, out, input, packed, format, bias);
}

void linear_silu_mul(Tensor out, Tensor input, Tensor packed, int64_t format, OptionalTensor bias) {
  multiply("linear_silu_mul", true, out, input, packed, format, bias);
}

void packed_embedding(Tensor out, Tensor packed, int64_t format, int64_t rows, Tensor token_ids,
                      OptionalTensor last_tokens) {
  constexpr const char* kOp = "packed_embedding";
  check(out.dim() == 2 && out.stride(1) == 1 && token_ids.numel() == out.size(0), kOp,
        "out must be [num_tokens, columns], token_ids [num_tokens]");
  PackedEmbeddingParams params{};
  params.out = out.mutable_data_ptr();
  params.format = as_format(format);
  params.packed = packed_data(packed, params.format, rows, out.size(1), kOp);
  params.token_ids = int32_data(token_ids, kOp, "token_ids");
  params.last_tokens = int32_data(last_tokens, kOp, "last_tokens");
  params.rows = rows;
  params.columns = out.size(1);
  params.out_stride = out.stride(0);
  params.num_tokens = static_cast<int32_t>(out.size(0));
  params.max_rows = last_tokens ? static_cast<int32_t>(last_tokens->numel()) : 0;
  params.dtype = float_dtype(out, kOp);
  call<packed_embedding_cpu>(params);
}

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_lite, m) {
  m.def(
      "packed_embedding(Tensor(a!) out, Tensor packed, int format, int rows, Tensor token_ids, "
      "Tensor? last_tokens) -> ()");
  m.def("packed_weight_bytes(int format, int rows, int columns) -> int");
  m.def(
      "pack_weight(Tensor(a!) packed, Tensor source, int format, int rows, int columns, "
      "int first_row, Tensor? scales) -> ()");
  m.def("linear(Tensor(a!) out, Tensor input, Tensor packed, int format, Tensor? bias) -> ()");
  m.def(
      "linear_silu_mul(Tensor(a!) out, Tensor input, Tensor packed, int format, Tensor? bias) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CPU, m) {
  m.impl("pack_weight", TORCH_BOX(&pack_weight));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_silu_mul", TORCH_BOX(&linear_silu_mul));
  m.impl("packed_embedding", TORCH_BOX(&packed_embedding));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CompositeExplicitAutograd, m) {
  m.impl("packed_weight_bytes", TORCH_BOX(&packed_bytes));
}

}  // namespace
}  // namespace vllm_lite
