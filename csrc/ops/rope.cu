// Rotary embedding, alone and with the storing of the step's keys and values. Bound by memory: a
// block per token, a thread per chunk; what is rotated together is two chunks, half a rotary_size
// apart.
#include <cmath>

#include "cache/kv_slot.h"
#include "ops/rope_store_kv.h"

namespace vllm_lite {
namespace {

using namespace device;

// Rotates the pairs (first[i], second[i]). By a position that the table does not have: to NaN,
// which shows in whatever the token leads to.
template <bool kAligned, typename T>
__device__ __forceinline__ void rotate(Chunk<T>& first, Chunk<T>& second, const float* cosines,
                                       const float* sines, bool has_position, int count) {
  constexpr int kAngles = Chunk<float>::kSize;
  auto a = to_floats(first), b = to_floats(second);
#pragma unroll
  for (int begin = 0; begin < Chunk<T>::kSize; begin += kAngles) {
    const Chunk<float> c = load_chunk<kAligned>(cosines + begin, has_position ? count - begin : 0);
    const Chunk<float> s = load_chunk<kAligned>(sines + begin, has_position ? count - begin : 0);
#pragma unroll
    for (int i = 0; i < kAngles; ++i) {
      const float x = a.values[begin + i], y = b.values[begin + i];
      const float cosine = has_position ? c.values[i] : NAN, sine = s.values[i];
      a.values[begin + i] = fmaf(x, cosine, -(y * sine));
      b.values[begin + i] = fmaf(y, cosine, x * sine);
    }
  }
  first = from_floats<T>(a);
  second = from_floats<T>(b);
}

// kStore: keys and values go into the cache. Else keys are rotated in place.
template <typename T, typename Cache, bool kAligned, bool kStore>
__global__ void rope_kernel(const __grid_constant__ RopeStoreKvParams p) {
  constexpr int kSize = Chunk<T>::kSize;
  const RopeParams& rope = p.rope;
  const int token = static_cast<int>(blockIdx.x);
  const int half = rope.rotary_size / 2;
  const int64_t position = rope.positions[token];
  const bool has_position = position >= 0 && position < rope.max_position;
  const float* cosines = rope.cos_sin + (has_position ? position * rope.rotary_size : 0);
  const float* sines = cosines + half;
  T* query = static_cast<T*>(rope.query) + token * rope.query_token_stride;
  T* key = static_cast<T*>(rope.key) + token * rope.key_token_stride;
  const T* value = static_cast<const T*>(p.store.value) + token * p.store.value_token_stride;

  // A thread's items: pairs of chunks to rotate in query heads, then in key heads; with kStore also
  // the chunks of key heads that are not rotated, then those of value heads.
  const int pairs = (half + kSize - 1) / kSize;
  const int rest = (rope.head_size - rope.rotary_size + kSize - 1) / kSize;
  const int chunks = (rope.head_size + kSize - 1) / kSize;
  const int rotated_items = (rope.num_heads + rope.num_kv_heads) * pairs;
  const int rest_items = rope.num_kv_heads * rest, value_items = rope.num_kv_heads * chunks;
  const int num_items = rotated_items + (kStore ? rest_items + value_items : 0);
  for (int item = static_cast<int>(threadIdx.x); item < num_items;
       item += static_cast<int>(blockDim.x)) {
    if (item < rotated_items) {
      const int head = item / pairs, kv_head = head - rope.num_heads;
      const int i = item % pairs * kSize, count = half - i;
      T* x = (kv_head < 0 ? query + int64_t{head} * rope.head_size
                          : key + int64_t{kv_head} * rope.head_size) +
             i;
      Chunk<T> first = load_chunk<kAligned>(x, count);
      Chunk<T> second = load_chunk<kAligned>(x + half, count);
      rotate<kAligned>(first, second, cosines + i, sines + i, has_position, count);
      if constexpr (kStore) {
        if (kv_head >= 0) {
          const KvSlot<T, Cache, kAligned> slot(p.store, token);
          if (!slot.exists()) continue;
          slot.store_key(kv_head, i, first, count);
          slot.store_key(kv_head, half + i, second, count);
          continue;
        }
      }
      store_chunk<kAligned>(x, first, count);
      store_chunk<kAligned>(x + half, second, count);
    } else if constexpr (kStore) {
      const KvSlot<T, Cache, kAligned> slot(p.store, token);
      if (!slot.exists()) return;
      int index = item - rotated_items;
      if (index < rest_items) {
        const int head = index / rest, i = rope.rotary_size + index % rest * kSize;
        const int count = rope.head_size - i;
        slot.store_key(head, i, load_chunk<kAligned>(key + head * rope.head_size + i, count),
                       count);
      } else {
        index -= rest_items;
        const int head = index / chunks, i = index % chunks * kSize, count = rope.head_size - i;
        slot.store_value(head, i, load_chunk<kAligned>(value + head * rope.head_size + i, count),
                         count);
      }
    }
  }
}

template <typename T>
bool is_aligned(const RopeParams& p) {
  return device::is_aligned<T>(
      {p.query, p.key, p.cos_sin},
      {p.rotary_size / 2, p.head_size, p.query_token_stride, p.key_token_stride});
}

template <typename T, typename Cache, bool kAligned, bool kStore>
void launch(const RopeStoreKvParams& p) {
  const RopeParams& rope = p.rope;
  const int64_t rotated =
      (int64_t{rope.num_heads} + rope.num_kv_heads) * num_chunks<T>(rope.rotary_size / 2);
  const int64_t stored = num_chunks<T>(rope.head_size - rope.rotary_size) +  // key
                         num_chunks<T>(rope.head_size);
  const int64_t items = rotated + (kStore ? rope.num_kv_heads * stored : 0);
  if (rope.num_tokens == 0 || items == 0) return;
  VL_LAUNCH((rope_kernel<T, Cache, kAligned, kStore>), rope.num_tokens, block_threads(items), 0,
            rope.stream, p);
}

}  // namespace

void rope_cuda(const RopeParams& p) {
  dispatch_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    dispatch_bool(is_aligned<T>(p),
                  [&](auto aligned) { launch<T, T, aligned, false>({.rope = p, .store = {}}); });
  });
}

void rope_store_kv_cuda(const RopeStoreKvParams& p) {
  check_slots(p.store, "rope_store_kv");
  dispatch_kv_dtypes(p.store, [&](auto element, auto cached) {
    using T = decltype(element);
    using Cache = decltype(cached);
    const bool all_aligned = is_aligned<T>(p.rope) && device::is_aligned<T>(p.store);
    dispatch_bool(all_aligned, [&](auto aligned) { launch<T, Cache, aligned, true>(p); });
  });
}

}  // namespace vllm_lite
