// Atomics: relaxed, as on a device. Each is a point where another thread may go on.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda_on_host/block.h"

namespace cuda_on_host {

template <typename T, typename... Allowed>
inline constexpr bool kIsOneOf = (std::is_same_v<T, Allowed> || ...);

template <typename T, typename F>
T atomic_update(T* address, F&& update) {
  scheduling_point();
  T before, after;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  do {
    after = update(before);
  } while (!__atomic_compare_exchange(address, &before, &after, /*weak=*/false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  return before;
}

}  // namespace cuda_on_host

// The types that CUDA has each of them for.
#define CUDA_ON_HOST_ATOMIC(name, expression, ...)                                               \
  template <typename T>                                                                          \
  T name(T* address, std::type_identity_t<T> value) {                                            \
    static_assert(::cuda_on_host::kIsOneOf<T, __VA_ARGS__>, #name ": no such atomic in CUDA");   \
    return ::cuda_on_host::atomic_update(address,                                                \
                                         [value](T old) { return static_cast<T>(expression); }); \
  }
CUDA_ON_HOST_ATOMIC(atomicAdd, old + value, unsigned, unsigned long long, float, double)
CUDA_ON_HOST_ATOMIC(atomicSub, old - value, unsigned)
CUDA_ON_HOST_ATOMIC(atomicMax, old < value ? value : old, int, unsigned, long long,
                    unsigned long long)
CUDA_ON_HOST_ATOMIC(atomicMin, value < old ? value : old, int, unsigned, long long,
                    unsigned long long)
CUDA_ON_HOST_ATOMIC(atomicAnd, old& value, int, unsigned, unsigned long long)
CUDA_ON_HOST_ATOMIC(atomicOr, old | value, int, unsigned, unsigned long long)
CUDA_ON_HOST_ATOMIC(atomicXor, old ^ value, int, unsigned, unsigned long long)
CUDA_ON_HOST_ATOMIC(atomicExch, (static_cast<void>(old), value), int, unsigned, unsigned long long,
                    float)
#undef CUDA_ON_HOST_ATOMIC

// Signed sums wrap around.
inline int atomicAdd(int* address, int value) {
  return static_cast<int>(
      atomicAdd(reinterpret_cast<unsigned*>(address), static_cast<unsigned>(value)));
}
inline int atomicSub(int* address, int value) {
  return static_cast<int>(
      atomicSub(reinterpret_cast<unsigned*>(address), static_cast<unsigned>(value)));
}

template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
  static_assert(::cuda_on_host::kIsOneOf<T, int, unsigned, unsigned short, unsigned long long>,
                "atomicCAS: no such atomic in CUDA");
  ::cuda_on_host::scheduling_point();
  __atomic_compare_exchange(address, &compare, &value, /*weak=*/false, __ATOMIC_RELAXED,
                            __ATOMIC_RELAXED);
  return compare;
}
