// The small ops of a transformer layer, for Python.
#include "bindings/back_ends.h"
#include "bindings/op_args.h"
#include "bindings/op_lists.h"
#include "ops/ops.h"

namespace vllm_lite {
namespace {

template <void (*kKernel)(const RmsNormParams&)>
void rms_norm(Tensor out, Tensor input, Tensor weight, double epsilon, OptionalTensor residual,
              int64_t stream) {
  constexpr const char* kOp = "rms_norm";
  const int64_t dim = input.dim();
  check(dim == 2 || dim == 3, kOp, "input must be 2-D or 3-D");
  auto check_like_input = [&](const Tensor& t, const char* message) {
    bool same = t.dim() == dim && t.scalar_type() == input.scalar_type() && t.stride(dim - 1) == 1;
    for (int64_t d = 0; same && d < dim; ++d) same = t.size(d) == input.size(d);
    check(same, kOp, message);
  };
  check_like_input(input, "the last dimension of input must be contiguous");
  check_like_input(out, "out must be like input, its last dimension contiguous");
  if (residual)
    check_like_input(*residual, "residual must be like input, its last dimension contiguous");
  check(weight.dim() == 1 && weight.size(0) == input.size(dim - 1) && weight.is_contiguous() &&
            weight.scalar_type() == input.scalar_type(),
        kOp, "weight must be [size], contiguous and of input's dtype");
  auto inner_stride = [&](const Tensor& t) { return dim == 3 ? t.stride(1) : 0; };
  check_same_device(kOp, input, out, weight, residual);
  RmsNormParams params{};
  params.out = out.mutable_data_ptr();
  params.input = input.const_data_ptr();
  params.weight = weight.const_data_ptr();
  params.out_outer_stride = out.stride(0);
  params.out_inner_stride = inner_stride(out);
  params.input_outer_stride = input.stride(0);
  params.input_inner_stride = inner_stride(input);
  if (residual) {
    params.residual = residual->mutable_data_ptr();
    params.residual_outer_stride = residual->stride(0);
    params.residual_inner_stride = inner_stride(*residual);
  }
  params.num_outer = input.size(0);
  params.num_inner = dim == 3 ? input.size(1) : 1;
  params.size = static_cast<int32_t>(input.size(dim - 1));
  params.epsilon = static_cast<float>(epsilon);
  params.dtype = float_dtype(input, kOp);
  params.stream = stream;
  call<kKernel>(params);
}

template <void (*kKernel)(const SiluMulParams&)>
void silu_mul(Tensor out, Tensor gate_up, int64_t stream) {
  constexpr const char* kOp = "silu_mul";
  check(out.dim() == 2 && gate_up.dim() == 2 && gate_up.size(0) == out.size(0) &&
            gate_up.size(1) == 2 * out.size(1) && out.stride(1) == 1 && gate_up.stride(1) == 1 &&
            out.scalar_type() == gate_up.scalar_type(),
        kOp, "out must be [num_tokens, size] and gate_up [num_tokens, 2 * size] of one dtype");
  check_same_device(kOp, out, gate_up);
  SiluMulParams params{};
  params.out = out.mutable_data_ptr();
  params.gate_up = gate_up.const_data_ptr();
  params.out_token_stride = out.stride(0);
  params.gate_up_token_stride = gate_up.stride(0);
  params.num_tokens = static_cast<int32_t>(out.size(0));
  params.size = static_cast<int32_t>(out.size(1));
  params.dtype = float_dtype(out, kOp);
  params.stream = stream;
  call<kKernel>(params);
}

template <void (*kKernel)(const EmbeddingParams&)>
void embedding(Tensor out, Tensor table, Tensor token_ids, OptionalTensor last_tokens,
               int64_t stream) {
  constexpr const char* kOp = "embedding";
  check(out.dim() == 2 && table.dim() == 2 && out.size(1) == table.size(1) && out.stride(1) == 1 &&
            table.is_contiguous() && token_ids.numel() == out.size(0),
        kOp,
        "out must be [num_tokens, size], table [vocab_size, size] and contiguous, token_ids "
        "[num_tokens]");
  check_same_device(kOp, out, table, token_ids, last_tokens);
  EmbeddingParams params{};
  params.out = out.mutable_data_ptr();
  params.table = table.const_data_ptr();
  params.token_ids = int32_data(token_ids, kOp, "token_ids");
  params.last_tokens = int32_data(last_tokens, kOp, "last_tokens");
  params.out_token_stride = out.stride(0);
  params.num_tokens = static_cast<int32_t>(out.size(0));
  params.size = static_cast<int32_t>(out.size(1));
  params.vocab_size = static_cast<int32_t>(table.size(0));
  params.max_rows = last_tokens ? static_cast<int32_t>(last_tokens->numel()) : 0;
  params.out_dtype = float_dtype(out, kOp);
  params.table_dtype = float_dtype(table, kOp);
  params.stream = stream;
  call<kKernel>(params);
}

STABLE_TORCH_LIBRARY_FRAGMENT(VL_OPS, m) {
  m.def(
      "rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon, Tensor(b!)? residual, "
      "int stream) -> ()");
  m.def("silu_mul(Tensor(a!) out, Tensor gate_up, int stream) -> ()");
  m.def(
      "embedding(Tensor(a!) out, Tensor table, Tensor token_ids, Tensor? last_tokens, int stream) "
      "-> ()");
}

#define VL_LAYER_OPS(back_end)                                   \
  m.impl("rms_norm", TORCH_BOX(&rms_norm<rms_norm_##back_end>)); \
  m.impl("silu_mul", TORCH_BOX(&silu_mul<silu_mul_##back_end>)); \
  m.impl("embedding", TORCH_BOX(&embedding<embedding_##back_end>));
VL_IMPLEMENT_OPS(VL_LAYER_OPS)

}  // namespace
}  // namespace vllm_lite
