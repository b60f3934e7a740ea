// Rotary embedding and what moves KV data, for Python.
#include "bindings/back_ends.h"
#include "bindings/op_args.h"
#include "bindings/op_lists.h"
#include "cache/store_kv.h"
#include "ops/rope_store_kv.h"

namespace vllm_lite {
namespace {

RopeParams rope_params(const char* op, const Tensor& query, const Tensor& key,
                       const Tensor& positions, const Tensor& cos_sin, int64_t stream) {
  check_heads(query, op, "query");
  check_heads(key, op, "key");
  check(query.scalar_type() == key.scalar_type() && query.size(2) == key.size(2) &&
            query.size(0) == key.size(0) && positions.numel() == query.size(0),
        op, "query, key and positions differ in dtype, head_size or num_tokens");
  check(cos_sin.dim() == 2 && cos_sin.size(1) % 2 == 0 && cos_sin.size(1) <= query.size(2), op,
        "cos_sin must be [max_position, rotary_size], rotary_size even and at most head_size");
  check_same_device(op, query, key, positions, cos_sin);
  RopeParams params{};
  params.query = query.mutable_data_ptr();
  params.key = key.mutable_data_ptr();
  params.positions = int32_data(positions, op, "positions");
  params.cos_sin = float_data(cos_sin, op, "cos_sin");
  params.query_token_stride = query.stride(0);
  params.key_token_stride = key.stride(0);
  params.max_position = cos_sin.size(0);
  params.num_tokens = static_cast<int32_t>(query.size(0));
  params.num_heads = static_cast<int32_t>(query.size(1));
  params.num_kv_heads = static_cast<int32_t>(key.size(1));
  params.head_size = static_cast<int32_t>(query.size(2));
  params.rotary_size = static_cast<int32_t>(cos_sin.size(1));
  params.dtype = float_dtype(query, op);
  params.stream = stream;
  return params;
}

template <void (*kKernel)(const RopeParams&)>
void rope(Tensor query, Tensor key, Tensor positions, Tensor cos_sin, int64_t stream) {
  kKernel(rope_params("rope", query, key, positions, cos_sin, stream));
}

StoreKvParams store_kv_params(const char* op, const Tensor& key, const Tensor& value,
                              const Tensor& kv_cache, const Tensor& slot_mapping, double k_scale,
                              double v_scale, int64_t stream) {
  check_heads(key, op, "key");
  check_heads(value, op, "value");
  const KvDType kv_dtype = kv_cache_dtype(kv_cache, key, op);
  check(value.scalar_type() == key.scalar_type(), op, "key and value must have one dtype");
  check(k_scale > 0 && v_scale > 0, op, "k_scale and v_scale must be positive");
  check(key.size(1) == kv_cache.size(2) && value.size(1) == key.size(1) &&
            value.size(2) == key.size(2),
        op, "key, value and kv_cache differ in heads or head_size");
  check(value.size(0) == key.size(0) && slot_mapping.numel() == key.size(0), op,
        "key, value and slot_mapping differ in num_tokens");
  check_same_device(op, kv_cache, key, value, slot_mapping);
  StoreKvParams params{};
  params.key = key.const_data_ptr();
  params.value = value.const_data_ptr();
  params.kv_cache = kv_cache.mutable_data_ptr();
  params.slot_mapping = int64_data(slot_mapping, op, "slot_mapping");
  params.key_token_stride = key.stride(0);
  params.value_token_stride = value.stride(0);
  params.num_blocks = kv_cache.size(0);
  params.num_tokens = static_cast<int32_t>(key.size(0));
  params.num_kv_heads = static_cast<int32_t>(key.size(1));
  params.head_size = static_cast<int32_t>(key.size(2));
  params.block_size = static_cast<int32_t>(kv_cache.size(3));
  params.dtype = float_dtype(key, op);
  params.kv_dtype = kv_dtype;
  params.k_scale = static_cast<float>(k_scale);
  params.v_scale = static_cast<float>(v_scale);
  params.stream = stream;
  return params;
}

template <void (*kKernel)(const StoreKvParams&)>
void store_kv(Tensor key, Tensor value, Tensor kv_cache, Tensor slot_mapping, double k_scale,
              double v_scale, int64_t stream) {
  kKernel(
      store_kv_params("store_kv", key, value, kv_cache, slot_mapping, k_scale, v_scale, stream));
}

template <void (*kKernel)(const RopeStoreKvParams&)>
void rope_store_kv(Tensor query, Tensor key, Tensor value, Tensor positions, Tensor cos_sin,
                   Tensor kv_cache, Tensor slot_mapping, double k_scale, double v_scale,
                   int64_t stream) {
  constexpr const char* kOp = "rope_store_kv";
  check_same_device(kOp, query, kv_cache);
  call<kKernel>(RopeStoreKvParams{
      .rope = rope_params(kOp, query, key, positions, cos_sin, stream),
      .store = store_kv_params(kOp, key, value, kv_cache, slot_mapping, k_scale, v_scale, stream)});
}

template <void (*kKernel)(const CopyBlocksParams&)>
void copy_blocks(Tensor kv_arena, Tensor block_pairs, int64_t stream) {
  constexpr const char* kOp = "copy_blocks";
  check(kv_arena.dim() == 6 && kv_arena.is_contiguous(), kOp,
        "kv_arena must be contiguous "
        "[num_layers, num_blocks, 2, num_kv_heads, block_size, head_size]");
  check(block_pairs.dim() == 2 && block_pairs.size(1) == 2, kOp,
        "block_pairs must be [num_pairs, 2]");
  check_same_device(kOp, kv_arena, block_pairs);
  CopyBlocksParams params{};
  params.kv_cache = kv_arena.mutable_data_ptr();
  params.block_pairs = int32_data(block_pairs, kOp, "block_pairs");
  params.block_bytes = kv_arena.stride(1) * static_cast<int64_t>(kv_arena.element_size());
  params.num_blocks = kv_arena.size(1);
  params.num_layers = static_cast<int32_t>(kv_arena.size(0));
  params.num_pairs = static_cast<int32_t>(block_pairs.size(0));
  params.stream = stream;
  kKernel(params);
}

template <void (*kKernel)(const SwapBlocksParams&)>
void swap_blocks(Tensor from_arena, Tensor to_arena, Tensor block_pairs, int64_t stream) {
  constexpr const char* kOp = "swap_blocks";
  bool alike = from_arena.dim() == 6 && to_arena.dim() == 6 && from_arena.is_contiguous() &&
               to_arena.is_contiguous() && from_arena.scalar_type() == to_arena.scalar_type();
  for (int64_t d = 0; alike && d < 6; ++d) {
    alike = d == 1 || from_arena.size(d) == to_arena.size(d);
  }
  check(
      alike, kOp,
      "from_arena and to_arena must be contiguous "
      "[num_layers, num_blocks, 2, num_kv_heads, block_size, head_size], alike but in num_blocks");
  check(block_pairs.dim() == 2 && block_pairs.size(1) == 2 && !block_pairs.is_cuda(), kOp,
        "block_pairs must be [num_pairs, 2] on the CPU");
  SwapBlocksParams params{};
  params.from_arena = from_arena.const_data_ptr();
  params.to_arena = to_arena.mutable_data_ptr();
  check(params.from_arena != params.to_arena || from_arena.numel() == 0, kOp,
        "from_arena and to_arena must be two arenas; copy_blocks copies within one");
  params.block_pairs = int32_data(block_pairs, kOp, "block_pairs");
  params.block_bytes = from_arena.stride(1) * static_cast<int64_t>(from_arena.element_size());
  params.from_num_blocks = from_arena.size(1);
  params.to_num_blocks = to_arena.size(1);
  params.num_layers = static_cast<int32_t>(from_arena.size(0));
  params.num_pairs = static_cast<int32_t>(block_pairs.size(0));
  params.stream = stream;
  kKernel(params);
}

STABLE_TORCH_LIBRARY_FRAGMENT(VL_OPS, m) {
  m.def(
      "rope(Tensor(a!) query, Tensor(b!) key, Tensor positions, Tensor cos_sin, int stream) -> ()");
  m.def(
      "store_kv(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping, "
      "float k_scale, float v_scale, int stream) -> ()");
  m.def(
      "rope_store_kv(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor positions, "
      "Tensor cos_sin, Tensor(c!) kv_cache, Tensor slot_mapping, float k_scale, float v_scale, "
      "int stream) -> ()");
  m.def("copy_blocks(Tensor(a!) kv_arena, Tensor block_pairs, int stream) -> ()");
  m.def(
      "swap_blocks(Tensor from_arena, Tensor(a!) to_arena, Tensor block_pairs, int stream) -> ()");
}

#define VL_CACHE_OPS(back_end)                                                  \
  m.impl("rope", TORCH_BOX(&rope<rope_##back_end>));                            \
  m.impl("store_kv", TORCH_BOX(&store_kv<store_kv_##back_end>));                \
  m.impl("rope_store_kv", TORCH_BOX(&rope_store_kv<rope_store_kv_##back_end>)); \
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks<copy_blocks_##back_end>));       \
  m.impl("swap_blocks", TORCH_BOX(&swap_blocks<swap_blocks_##back_end>));
VL_IMPLEMENT_OPS(VL_CACHE_OPS)

}  // namespace
}  // namespace vllm_lite
