// Where a token's keys and values go in the cache, for CUDA kernels that store them.
#pragma once

#include "cache/store_kv.h"
#include "core/chunk.h"

namespace vllm_lite::device {

// Moves a token's chunks into its slot; Cache is T, or Float8E4M3 of which value * scale is the
// value. Nothing is stored in a negative slot or in one beyond the cache.
template <typename T, typename Cache, bool kAligned>
class KvSlot {
 public:
  __device__ KvSlot(const StoreKvParams& p, int token) : params_(p) {
    const int64_t slot = p.slot_mapping[token];
    // 32 bits: check_slots() has seen that they suffice.
    const uint32_t block_size = static_cast<uint32_t>(p.block_size);
    if (slot < 0 || slot >= p.num_blocks * block_size) return;
    const uint32_t block = static_cast<uint32_t>(slot) / block_size;
    const uint32_t offset = static_cast<uint32_t>(slot) % block_size;
    head_stride_ = int64_t{p.block_size} * p.head_size;
    first_ = static_cast<Cache*>(p.kv_cache) + 2 * block * p.num_kv_heads * head_stride_ +
             int64_t{offset} * p.head_size;
  }

  __device__ bool exists() const { return first_ != nullptr; }

  // Elements i to i + count - 1 of a head.
  __device__ void store_key(int head, int i, const Chunk<T>& chunk, int count) const {
    store(head, i, chunk, count, params_.k_scale);
  }
  __device__ void store_value(int head, int i, const Chunk<T>& chunk, int count) const {
    store(params_.num_kv_heads + head, i, chunk, count, params_.v_scale);
  }

 private:
  __device__ void store(int head, int i, const Chunk<T>& chunk, int count, float scale) const {
    Cache* to = first_ + head * head_stride_ + i;
    if constexpr (std::is_same_v<T, Cache>) {
      store_chunk<kAligned>(to, chunk, count);
    } else {
      Chunk<Cache, Chunk<T>::kSize> scaled;
#pragma unroll
      for (int j = 0; j < Chunk<T>::kSize; ++j) {
        scaled.values[j] = from_float<Cache>(to_float(chunk.values[j]) / scale);
      }
      store_chunk<kAligned>(to, scaled, count);
    }
  }

  const StoreKvParams& params_;
  Cache* first_ = nullptr;  // of the first key head
  int64_t head_stride_ = 0;
};

// ---- host side

inline void check_slots(const StoreKvParams& p, const char* op) {
  VL_CHECK(p.kv_dtype != KvDType::kInt8,
           std::string(op) + ": an int8 KV cache has no CUDA kernel; use float8_e4m3fn");
  VL_CHECK(p.num_blocks * p.block_size <= UINT32_MAX,
           std::string(op) + ": the cache has more than 2^32 - 1 slots");
}

template <typename T>
bool is_aligned(const StoreKvParams& p) {
  return is_aligned<T>({p.key, p.value, p.kv_cache},
                       {p.head_size, p.key_token_stride, p.value_token_stride});
}

// Calls f(T{}, Cache{}) with the storage types of the new and of the stored KV.
template <typename F>
void dispatch_kv_dtypes(const StoreKvParams& p, const F& f) {
  dispatch_dtype(p.dtype, [&](auto zero) {
    if (p.kv_dtype == KvDType::kFloat8E4M3) return f(zero, Float8E4M3{});
    f(zero, zero);
  });
}

// Threads of a block that has `items` to do.
inline uint32_t block_threads(int64_t items) {
  constexpr int64_t kMaxThreads = 512;
  return static_cast<uint32_t>(items < kMaxThreads ? (items + 31) / 32 * 32 : kMaxThreads);
}

}  // namespace vllm_lite::device
