// Warp collectives: __syncwarp, shuffles, votes, match and integer reductions.
//
// As on a device, only __syncwarp orders memory. A lane that reads from a lane which does not take
// part gets an error (a device gives it anything).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace cuda_on_host {

enum class Shuffle { kIndex, kUp, kDown, kXor };
enum class Reduce { kAdd, kMin, kMax, kAnd, kOr, kXor };

void sync_warp(uint32_t mask);
uint64_t shuffle_bits(Shuffle kind, uint32_t mask, uint64_t bits, uint32_t argument, int width);
uint32_t ballot(uint32_t mask, bool predicate);
bool any(uint32_t mask, bool predicate);
bool all(uint32_t mask, bool predicate);
uint32_t match_any(uint32_t mask, uint64_t bits);
int32_t reduce_signed(Reduce kind, uint32_t mask, int32_t value);
uint32_t reduce_unsigned(Reduce kind, uint32_t mask, uint32_t value);

template <typename T>
uint64_t to_bits(T value) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T shuffle(Shuffle kind, uint32_t mask, T value, uint32_t argument, int width) {
  const uint64_t bits = shuffle_bits(kind, mask, to_bits(value), argument, width);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace cuda_on_host

inline void __syncwarp(unsigned mask = 0xffffffffu) { ::cuda_on_host::sync_warp(mask); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return ::cuda_on_host::shuffle(::cuda_on_host::Shuffle::kIndex, mask, value,
                                 static_cast<uint32_t>(lane), width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return ::cuda_on_host::shuffle(::cuda_on_host::Shuffle::kUp, mask, value, delta, width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return ::cuda_on_host::shuffle(::cuda_on_host::Shuffle::kDown, mask, value, delta, width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  return ::cuda_on_host::shuffle(::cuda_on_host::Shuffle::kXor, mask, value,
                                 static_cast<uint32_t>(lane_mask), width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return ::cuda_on_host::ballot(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return ::cuda_on_host::any(mask, predicate != 0);
}
inline int __all_sync(unsigned mask, int predicate) {
  return ::cuda_on_host::all(mask, predicate != 0);
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  return ::cuda_on_host::match_any(mask, ::cuda_on_host::to_bits(value));
}

#define CUDA_ON_HOST_REDUCE(name, kind)                                                \
  inline unsigned __reduce_##name##_sync(unsigned mask, unsigned value) {              \
    return ::cuda_on_host::reduce_unsigned(::cuda_on_host::Reduce::kind, mask, value); \
  }
#define CUDA_ON_HOST_REDUCE_SIGNED(name, kind)                                       \
  inline int __reduce_##name##_sync(unsigned mask, int value) {                      \
    return ::cuda_on_host::reduce_signed(::cuda_on_host::Reduce::kind, mask, value); \
  }
CUDA_ON_HOST_REDUCE(add, kAdd)
CUDA_ON_HOST_REDUCE(min, kMin)
CUDA_ON_HOST_REDUCE(max, kMax)
CUDA_ON_HOST_REDUCE(and, kAnd)
CUDA_ON_HOST_REDUCE(or, kOr)
CUDA_ON_HOST_REDUCE(xor, kXor)
CUDA_ON_HOST_REDUCE_SIGNED(add, kAdd)
CUDA_ON_HOST_REDUCE_SIGNED(min, kMin)
CUDA_ON_HOST_REDUCE_SIGNED(max, kMax)
#undef CUDA_ON_HOST_REDUCE
#undef CUDA_ON_HOST_REDUCE_SIGNED
