// New keys and values into their slots, bound by memory: a block per token, a thread per chunk.
#include "cache/kv_slot.h"

namespace vllm_lite {
namespace {

using namespace device;

template <typename T, typename Cache, bool kAligned>
__global__ void store_kv_kernel(const __grid_constant__ StoreKvParams p, int chunks_per_head) {
  const int token = static_cast<int>(blockIdx.x);
  const KvSlot<T, Cache, kAligned> slot(p, token);
  if (!slot.exists()) return;
  const T* key = static_cast<const T*>(p.key) + token * p.key_token_stride;
  const T* value = static_cast<const T*>(p.value) + token * p.value_token_stride;
  const int num_items = p.num_kv_heads * chunks_per_head;
  for (int item = static_cast<int>(threadIdx.x); item < num_items;
       item += static_cast<int>(blockDim.x)) {
    const int head = item / chunks_per_head;
    const int i = item % chunks_per_head * Chunk<T>::kSize, count = p.head_size - i;
    const int from = head * p.head_size + i;
    const Chunk<T> k = load_chunk<kAligned>(key + from, count);
    const Chunk<T> v = load_chunk<kAligned>(value + from, count);
    slot.store_key(head, i, k, count);
    slot.store_value(head, i, v, count);
  }
}

}  // namespace

void store_kv_cuda(const StoreKvParams& p) {
  if (p.num_tokens == 0 || p.num_kv_heads == 0 || p.head_size == 0) return;
  check_slots(p, "store_kv");
  dispatch_kv_dtypes(p, [&](auto element, auto cached) {
    using T = decltype(element);
    using Cache = decltype(cached);
    const int per_head = static_cast<int>(num_chunks<T>(p.head_size));
    dispatch_bool(is_aligned<T>(p), [&](auto aligned) {
      VL_LAUNCH((store_kv_kernel<T, Cache, aligned>), p.num_tokens,
                block_threads(int64_t{p.num_kv_heads} * per_head), 0, p.stream, p, per_head);
    });
  });
}

}  // namespace vllm_lite
