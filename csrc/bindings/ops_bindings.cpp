// Tensor ops for Python through torch's stable ABI: check the tensors, fill a params struct, call
// the kernel. Every check names the op and the argument. python/vllm_lite/ops.py is the caller.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "attention/params.h"
#include "cache/store_kv.h"
#include "core/check.h"
#include "core/isa.h"
#include "core/parallel_for.h"
#include "ops/ops.h"

namespace vllm_lite {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

void check(bool condition, const char* op, const char* what) {
  VL_CHECK(condition, std::string(op) + ": " + what);
}

DType float_dtype(const Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      throw Error(std::string(op) + ": dtype must be float32, bfloat16 or float16");
  }
}

// Pointer to an int32/int64/float/uint8 tensor's data, which must be contiguous; nullptr for None.
template <typename T, ScalarType kType>
T* contiguous_data(const OptionalTensor& tensor, const char* op, const char* name) {
  if (!tensor.has_value()) return nullptr;
  check(tensor->scalar_type() == kType && tensor->is_contiguous(), op,
        (std::string(name) + " has the wrong dtype or is not contiguous").c_str());
  return static_cast<T*>(tensor->data_ptr());
}
int32_t* int32_data(const OptionalTensor& t, const char* op, const char* name) {
  return contiguous_data<int32_t, ScalarType::Int>(t, op, name);
}
int64_t* int64_data(const OptionalTensor& t, const char* op, const char* name) {
  return contiguous_data<int64_t, ScalarType::Long>(t, op, name);
}
float* float_data(const OptionalTensor& t, const char* op, const char* name) {
  return contiguous_data<float, ScalarType::Float>(t, op, name);
}
uint8_t* byte_data(const OptionalTensor& t, const char* op, const char* name) {
  return contiguous_data<uint8_t, ScalarType::Byte>(t, op, name);
}

// [tokens, heads, size] whose heads are back to back; the token stride is free.
void check_heads(const Tensor& t, const char* op, const char* name) {
  check(t.dim() == 3 && t.stride(2) == 1 && t.stride(1) == t.size(2), op,
        (std::string(name) + " must be [num_tokens, heads, head_size] with contiguous heads")
            .c_str());
}

void paged_attention(Tensor out, Tensor query, Tensor kv_cache, Tensor block_tables, Tensor rows,
                     Tensor query_start, Tensor seq_lens, double scale, int64_t sliding_window,
                     double soft_cap, OptionalTensor alibi_slopes, int64_t stream) {
  constexpr const char* kOp = "paged_attention";
  check_heads(out, kOp, "out");
  check_heads(query, kOp, "query");
  check(kv_cache.dim() == 5 && kv_cache.size(1) == 2 && kv_cache.is_contiguous(), kOp,
        "kv_cache must be contiguous [num_blocks, 2, num_kv_heads, block_size, head_size]");
  const DType dtype = float_dtype(query, kOp);
  check(out.scalar_type() == query.scalar_type() && kv_cache.scalar_type() == query.scalar_type(),
        kOp, "out, query and kv_cache must have one dtype");
  check(
      out.size(0) == query.size(0) && out.size(1) == query.size(1) && out.size(2) == query.size(2),
      kOp, "out and query must have one shape");
  const int64_t num_heads = query.size(1), num_kv_heads = kv_cache.size(2),
                head_size = query.size(2);
  check(kv_cache.size(4) == head_size, kOp, "kv_cache and query differ in head_size");
  check(kv_cache.size(3) > 0, kOp, "the block_size of kv_cache must be at least 1");
  check(sliding_window >= 0, kOp, "sliding_window must be positive, or 0 for none");
  check(num_kv_heads > 0 && num_heads % num_kv_heads == 0, kOp,
        "num_heads must be a multiple of num_kv_heads");
  check(
      head_size == 64 || head_size == 80 || head_size == 96 || head_size == 128 || head_size == 256,
      kOp, "head_size must be 64, 80, 96, 128 or 256");
  check(rows.numel() == seq_lens.numel() && query_start.numel() == rows.numel() + 1, kOp,
        "rows, seq_lens and query_start differ in the number of sequences");
  check(block_tables.dim() == 2, kOp, "block_tables must be [max_rows, max_blocks]");
  check(!alibi_slopes || alibi_slopes->numel() == num_heads, kOp,
        "alibi_slopes must be [num_heads]");
  PagedAttentionParams params{};
  params.out = out.mutable_data_ptr();
  params.query = query.const_data_ptr();
  params.kv_cache = kv_cache.const_data_ptr();
  params.block_tables = int32_data(block_tables, kOp, "block_tables");
  params.rows = int32_data(rows, kOp, "rows");
  params.query_start = int32_data(query_start, kOp, "query_start");
  params.seq_lens = int32_data(seq_lens, kOp, "seq_lens");
  params.alibi_slopes = float_data(alibi_slopes, kOp, "alibi_slopes");
  params.out_token_stride = out.stride(0);
  params.query_token_stride = query.stride(0);
  params.block_table_stride = block_tables.size(1);
  params.num_blocks = kv_cache.size(0);
  params.num_tokens = query.size(0);
  params.max_rows = block_tables.size(0);
  params.num_seqs = static_cast<int32_t>(rows.numel());
  params.num_heads = static_cast<int32_t>(num_heads);
  params.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  params.head_size = static_cast<int32_t>(head_size);
  params.block_size = static_cast<int32_t>(kv_cache.size(3));
  params.scale = static_cast<float>(scale);
  params.sliding_window = static_cast<int32_t>(sliding_window);
  params.soft_cap = static_cast<float>(soft_cap);
  params.dtype = dtype;
  params.stream = stream;
  paged_attention_cpu(params);
}

void store_kv(Tensor key, Tensor value, Tensor kv_cache, Tensor slot_mapping, int64_t stream) {
  constexpr const char* kOp = "store_kv";
  check_heads(key, kOp, "key");
  check_heads(value, kOp, "value");
  check(kv_cache.dim() == 5 && kv_cache.size(1) == 2 && kv_cache.is_contiguous(), kOp,
        "kv_cache must be contiguous [num_blocks, 2, num_kv_heads, block_size, head_size]");
  check(
      key.scalar_type() == kv_cache.scalar_type() && value.scalar_type() == kv_cache.scalar_type(),
      kOp, "key, value and kv_cache must have one dtype");
  check(key.size(1) == kv_cache.size(2) && key.size(2) == kv_cache.size(4) &&
            value.size(1) == key.size(1) && value.size(2) == key.size(2),
        kOp, "key, value and kv_cache differ in heads or head_size");
  check(value.size(0) == key.size(0) && slot_mapping.numel() == key.size(0), kOp,
        "key, value and slot_mapping differ in num_tokens");
  StoreKvParams params{};
  params.key = key.const_data_ptr();
  params.value = value.const_data_ptr();
  params.kv_cache = kv_cache.mutable_data_ptr();
  params.slot_mapping = int64_data(slot_mapping, kOp, "slot_mapping");
  params.key_token_stride = key.stride(0);
  params.value_token_stride = value.stride(0);
  params.num_blocks = kv_cache.size(0);
  params.num_tokens = static_cast<int32_t>(key.size(0));
  params.num_kv_heads = static_cast<int32_t>(key.size(1));
  params.head_size = static_cast<int32_t>(key.size(2));
  params.block_size = static_cast<int32_t>(kv_cache.size(3));
  params.dtype = float_dtype(key, kOp);
  params.stream = stream;
  store_kv_cpu(params);
}

void copy_blocks(Tensor kv_arena, Tensor block_pairs, int64_t stream) {
  constexpr const char* kOp = "copy_blocks";
  check(kv_arena.dim() == 6 && kv_arena.is_contiguous(), kOp,
        "kv_arena must be contiguous "
        "[num_layers, num_blocks, 2, num_kv_heads, block_size, head_size]");
  check(block_pairs.dim() == 2 && block_pairs.size(1) == 2, kOp,
        "block_pairs must be [num_pairs, 2]");
  CopyBlocksParams params{};
  params.kv_cache = kv_arena.mutable_data_ptr();
  params.block_pairs = int32_data(block_pairs, kOp, "block_pairs");
  params.block_bytes = kv_arena.stride(1) * static_cast<int64_t>(kv_arena.element_size());
  params.num_blocks = kv_arena.size(1);
  params.num_layers = static_cast<int32_t>(kv_arena.size(0));
  params.num_pairs = static_cast<int32_t>(block_pairs.size(0));
  params.stream = stream;
  copy_blocks_cpu(params);
}

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
  rms_norm_cpu(params);
}

void rope(Tensor query, Tensor key, Tensor positions, Tensor cos_sin, int64_t stream) {
  constexpr const char* kOp = "rope";
  check_heads(query, kOp, "query");
  check_heads(key, kOp, "key");
  check(query.scalar_type() == key.scalar_type() && query.size(2) == key.size(2) &&
            query.size(0) == key.size(0) && positions.numel() == query.size(0),
        kOp, "query, key and positions differ in dtype, head_size or num_tokens");
  check(cos_sin.dim() == 2 && cos_sin.size(1) % 2 == 0 && cos_sin.size(1) <= query.size(2), kOp,
        "cos_sin must be [max_position, rotary_size], rotary_size even and at most head_size");
  RopeParams params{};
  params.query = query.mutable_data_ptr();
  params.key = key.mutable_data_ptr();
  params.positions = int32_data(positions, kOp, "positions");
  params.cos_sin = float_data(cos_sin, kOp, "cos_sin");
  params.query_token_stride = query.stride(0);
  params.key_token_stride = key.stride(0);
  params.max_position = cos_sin.size(0);
  params.num_tokens = static_cast<int32_t>(query.size(0));
  params.num_heads = static_cast<int32_t>(query.size(1));
  params.num_kv_heads = static_cast<int32_t>(key.size(1));
  params.head_size = static_cast<int32_t>(query.size(2));
  params.rotary_size = static_cast<int32_t>(cos_sin.size(1));
  params.dtype = float_dtype(query, kOp);
  params.stream = stream;
  rope_cpu(params);
}

void silu_mul(Tensor out, Tensor gate_up, int64_t stream) {
  constexpr const char* kOp = "silu_mul";
  check(out.dim() == 2 && gate_up.dim() == 2 && gate_up.size(0) == out.size(0) &&
            gate_up.size(1) == 2 * out.size(1) && out.stride(1) == 1 && gate_up.stride(1) == 1 &&
            out.scalar_type() == gate_up.scalar_type(),
        kOp, "out must be [num_tokens, size] and gate_up [num_tokens, 2 * size] of one dtype");
  SiluMulParams params{};
  params.out = out.mutable_data_ptr();
  params.gate_up = gate_up.const_data_ptr();
  params.out_token_stride = out.stride(0);
  params.gate_up_token_stride = gate_up.stride(0);
  params.num_tokens = static_cast<int32_t>(out.size(0));
  params.size = static_cast<int32_t>(out.size(1));
  params.dtype = float_dtype(out, kOp);
  params.stream = stream;
  silu_mul_cpu(params);
}

void dequantize(Tensor out, Tensor blocks, int64_t ggml_type) {
  constexpr const char* kOp = "dequantize";
  check(out.is_contiguous(), kOp, "out must be contiguous");
  DequantizeParams params{};
  params.out = out.mutable_data_ptr();
  params.blocks = byte_data(blocks, kOp, "blocks");
  params.num_elements = out.numel();
  params.type = static_cast<GgmlType>(ggml_type);
  params.dtype = float_dtype(out, kOp);
  const int64_t expected = dequantize_block_bytes(params.type, params.num_elements);
  check(blocks.numel() == expected, kOp, "blocks does not hold out's number of elements");
  dequantize_cpu(params);
}

void sample(Tensor logits, Tensor rows, Tensor positions, Tensor float_state, Tensor int_state,
            Tensor seeds, OptionalTensor output_counts, OptionalTensor prompt_mask,
            OptionalTensor bias_start, OptionalTensor bias_ids, OptionalTensor bias_values,
            OptionalTensor allowed_start, OptionalTensor allowed_ids, OptionalTensor stop_start,
            OptionalTensor stop_ids, Tensor token_ids, OptionalTensor logprobs,
            OptionalTensor ranks, OptionalTensor top_ids, OptionalTensor top_logprobs,
            int64_t stream) {
  constexpr const char* kOp = "sample";
  check(logits.dim() == 2 && logits.stride(1) == 1 && logits.scalar_type() == ScalarType::Float,
        kOp, "logits must be float32 [num_rows, vocab_size]");
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  check(rows.numel() == num_rows && positions.numel() == num_rows && token_ids.numel() == num_rows,
        kOp, "rows, positions and token_ids must be [num_rows]");
  check(float_state.dim() == 2 && float_state.size(0) == 6 && int_state.dim() == 2 &&
            int_state.size(0) == 3 && int_state.size(1) == float_state.size(1) &&
            seeds.numel() == float_state.size(1),
        kOp, "float_state must be [6, max_rows], int_state [3, max_rows] and seeds [max_rows]");
  const int64_t max_rows = seeds.numel();
  check(output_counts.has_value() == prompt_mask.has_value(), kOp,
        "output_counts and prompt_mask come together");
  check(!output_counts || (output_counts->numel() == max_rows * vocab_size &&
                           prompt_mask->numel() == max_rows * vocab_size),
        kOp, "output_counts and prompt_mask must be [max_rows, vocab_size]");
  for (const OptionalTensor* start : {&bias_start, &allowed_start, &stop_start}) {
    check(!start->has_value() || (*start)->numel() == num_rows + 1, kOp,
          "an id list's start must be [num_rows + 1]");
  }
  check(
      top_ids.has_value() == top_logprobs.has_value() && logprobs.has_value() == ranks.has_value(),
      kOp, "top_ids and top_logprobs, logprobs and ranks come together");
  const float* floats = float_data(float_state, kOp, "float_state");
  const int32_t* ints = int32_data(int_state, kOp, "int_state");
  SampleParams params{};
  params.logits = static_cast<const float*>(logits.const_data_ptr());
  params.logits_stride = logits.stride(0);
  params.rows = int32_data(rows, kOp, "rows");
  params.positions = int32_data(positions, kOp, "positions");
  params.temperature = floats;
  params.top_p = floats + max_rows;
  params.min_p = floats + 2 * max_rows;
  params.repetition_penalty = floats + 3 * max_rows;
  params.presence_penalty = floats + 4 * max_rows;
  params.frequency_penalty = floats + 5 * max_rows;
  params.top_k = ints;
  params.num_logprobs = ints + max_rows;
  params.min_total_tokens = ints + 2 * max_rows;
  params.seeds = reinterpret_cast<const uint64_t*>(int64_data(seeds, kOp, "seeds"));
  params.output_counts = int32_data(output_counts, kOp, "output_counts");
  params.prompt_mask = byte_data(prompt_mask, kOp, "prompt_mask");
  params.bias_start = int32_data(bias_start, kOp, "bias_start");
  params.bias_ids = int32_data(bias_ids, kOp, "bias_ids");
  params.bias_values = float_data(bias_values, kOp, "bias_values");
  params.allowed_start = int32_data(allowed_start, kOp, "allowed_start");
  params.allowed_ids = int32_data(allowed_ids, kOp, "allowed_ids");
  params.stop_start = int32_data(stop_start, kOp, "stop_start");
  params.stop_ids = int32_data(stop_ids, kOp, "stop_ids");
  params.token_ids = int32_data(token_ids, kOp, "token_ids");
  params.logprobs = float_data(logprobs, kOp, "logprobs");
  params.ranks = int32_data(ranks, kOp, "ranks");
  params.top_ids = int32_data(top_ids, kOp, "top_ids");
  params.top_logprobs = float_data(top_logprobs, kOp, "top_logprobs");
  params.num_rows = static_cast<int32_t>(num_rows);
  params.vocab_size = static_cast<int32_t>(vocab_size);
  params.max_rows = static_cast<int32_t>(max_rows);
  params.max_logprobs = top_ids ? static_cast<int32_t>(top_ids->size(1)) : 0;
  params.stream = stream;
  sample_cpu(params);
}

int64_t best_cpu_isa() { return static_cast<int64_t>(best_isa()); }
int64_t current_cpu_isa() { return static_cast<int64_t>(current_isa()); }
void set_cpu_isa(int64_t isa) {
  VL_CHECK(isa >= 0 && isa <= 2, "set_cpu_isa: must be 0, 1 or 2");
  set_isa(static_cast<Isa>(isa));
}

// Our kernels and torch's share torch's pool.
void parallel_in_torch(int64_t count, int64_t grain, const void* context, ParallelBody body) {
  torch::stable::parallel_for(0, count, grain,
                              [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

const bool parallel_backend_installed = (set_parallel_backend(parallel_in_torch), true);

}  // namespace
}  // namespace vllm_lite

STABLE_TORCH_LIBRARY(vllm_lite, m) {
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor kv_cache, Tensor block_tables, "
      "Tensor rows, Tensor query_start, Tensor seq_lens, float scale, int sliding_window, "
      "float soft_cap, "
      "Tensor? alibi_slopes, int stream) -> ()");
  m.def(
      "store_kv(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping, "
      "int stream) -> ()");
  m.def("copy_blocks(Tensor(a!) kv_arena, Tensor block_pairs, int stream) -> ()");
  m.def(
      "rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon, Tensor(b!)? residual, "
      "int stream) -> ()");
  m.def(
      "rope(Tensor(a!) query, Tensor(b!) key, Tensor positions, Tensor cos_sin, int stream) -> ()");
  m.def("silu_mul(Tensor(a!) out, Tensor gate_up, int stream) -> ()");
  m.def("dequantize(Tensor(a!) out, Tensor blocks, int ggml_type) -> ()");
  m.def(
      "sample(Tensor logits, Tensor rows, Tensor positions, Tensor float_state, Tensor int_state, "
      "Tensor seeds, Tensor(a!)? output_counts, Tensor? prompt_mask, Tensor? bias_start, "
      "Tensor? bias_ids, Tensor? bias_values, Tensor? allowed_start, Tensor? allowed_ids, "
      "Tensor? stop_start, "
      "Tensor? stop_ids, Tensor(b!) token_ids, Tensor(c!)? logprobs, Tensor(d!)? ranks, "
      "Tensor(e!)? top_ids, Tensor(f!)? top_logprobs, int stream) -> ()");
  m.def("best_cpu_isa() -> int");
  m.def("current_cpu_isa() -> int");
  m.def("set_cpu_isa(int isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&vllm_lite::paged_attention));
  m.impl("store_kv", TORCH_BOX(&vllm_lite::store_kv));
  m.impl("copy_blocks", TORCH_BOX(&vllm_lite::copy_blocks));
  m.impl("rms_norm", TORCH_BOX(&vllm_lite::rms_norm));
  m.impl("rope", TORCH_BOX(&vllm_lite::rope));
  m.impl("silu_mul", TORCH_BOX(&vllm_lite::silu_mul));
  m.impl("dequantize", TORCH_BOX(&vllm_lite::dequantize));
  m.impl("sample", TORCH_BOX(&vllm_lite::sample));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CompositeExplicitAutograd, m) {
  m.impl("best_cpu_isa", TORCH_BOX(&vllm_lite::best_cpu_isa));
  m.impl("current_cpu_isa", TORCH_BOX(&vllm_lite::current_cpu_isa));
  m.impl("set_cpu_isa", TORCH_BOX(&vllm_lite::set_cpu_isa));
}
