// What moves KV data, for Python.
#include "bindings/back_ends.h"
#include "bindings/op_args.h"
#include "cache/store_kv.h"

namespace vllm_lite {
namespace {

template <void (*kKernel)(const StoreKvParams&)>
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
  check_same_device(kOp, kv_cache, key, value, slot_mapping);
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
  kKernel(params);
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

STABLE_TORCH_LIBRARY_FRAGMENT(VL_OPS, m) {
  m.def(
      "store_kv(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping, "
      "int stream) -> ()");
  m.def("copy_blocks(Tensor(a!) kv_arena, Tensor block_pairs, int stream) -> ()");
}

#define VL_CACHE_OPS(back_end)                                   \
  m.impl("store_kv", TORCH_BOX(&store_kv<store_kv_##back_end>)); \
  m.impl("copy_blocks", TORCH_BOX(&copy_blocks<copy_blocks_##back_end>));
VL_IMPLEMENT_OPS(VL_CACHE_OPS)

}  // namespace
}  // namespace vllm_lite
