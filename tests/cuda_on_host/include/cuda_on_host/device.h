// The host's half of core/device.h: the same names with the same meaning, for any compiler but
// nvcc. What each does is said there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/check.h"
#include "cuda_on_host/async_copy.h"
#include "cuda_on_host/atomics.h"
#include "cuda_on_host/barriers.h"
#include "cuda_on_host/block.h"
#include "cuda_on_host/intrinsics.h"
#include "cuda_on_host/language.h"
#include "cuda_on_host/launch.h"
#include "cuda_on_host/number_formats.h"
#include "cuda_on_host/options.h"
#include "cuda_on_host/shared_memory.h"
#include "cuda_on_host/tensor_core.h"
#include "cuda_on_host/warp_ops.h"
#include "cuda_on_host/wgmma.h"

#define VL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                       \
  ::vllm_lite::device::launch_on_host(kernel, #kernel, (grid), (block), (shared_bytes), \
                                      (stream)__VA_OPT__(, ) __VA_ARGS__)
#define VL_SHARED(type, name, ...) CUDA_ON_HOST_SHARED(type, name, __VA_ARGS__)
#define VL_DYNAMIC_SHARED(type, name) \
  type* name = static_cast<type*>(::cuda_on_host::dynamic_shared())

namespace vllm_lite {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};

namespace device {

// ---- host side

template <typename... Parameters, typename... Arguments>
void launch_on_host(void (*kernel)(Parameters...), const char* name, dim3 grid, dim3 block,
                    size_t shared_bytes, int64_t /*stream: all work is done on return*/,
                    Arguments&&... arguments) {
  try {
    cuda_on_host::launch(kernel, grid, block, shared_bytes, std::forward<Arguments>(arguments)...);
  } catch (const cuda_on_host::LaunchError& error) {
    throw Error(std::string(name) + ": " + error.what());
  }
}

inline int current_device() { return 0; }
inline int num_multiprocessors() { return cuda_on_host::options().num_multiprocessors; }
using cuda_on_host::max_dynamic_shared_bytes;

template <typename Kernel>
void allow_dynamic_shared(Kernel kernel, int bytes) {
  try {
    cuda_on_host::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), bytes);
  } catch (const cuda_on_host::LaunchError& error) {
    throw Error(error.what());
  }
}

template <typename Kernel>
int blocks_per_multiprocessor(Kernel, int threads, int dynamic_shared_bytes) {
  return cuda_on_host::blocks_per_multiprocessor(threads, dynamic_shared_bytes);
}

inline void copy_async(void* to, const void* from, int64_t bytes, int64_t /*stream*/) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}
inline void fill_async(void* to, int byte, int64_t bytes, int64_t /*stream*/) {
  std::memset(to, byte, static_cast<size_t>(bytes));
}

inline void synchronize(int64_t /*stream*/) {}

// ---- element types

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return cuda_on_host::bfloat16_to_float(x.bits); }
inline float to_float(Float16 x) { return cuda_on_host::float16_to_float(x.bits); }
inline float to_float(Float8E4M3 x) { return cuda_on_host::float8_e4m3_to_float(x.bits); }

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {
  return {cuda_on_host::float_to_bfloat16(x)};
}
template <>
inline Float16 from_float<Float16>(float x) {
  return {cuda_on_host::float_to_float16(x)};
}
template <>
inline Float8E4M3 from_float<Float8E4M3>(float x) {
  return {cuda_on_host::float_to_float8_e4m3(x)};
}

template <typename T>
uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

// ---- arithmetic

inline int opaque(int x) { return x; }

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

// With an error of the device's size, so that a tolerance which only an exact tanh meets fails.
inline float tanh_approx(float x) {
  constexpr uint32_t kDroppedBits = 13;
  const uint32_t bits = std::bit_cast<uint32_t>(std::tanh(x));
  return std::bit_cast<float>((bits + (1u << (kDroppedBits - 1))) & ~0u << kDroppedBits);
}

// ---- tensor cores

using cuda_on_host::shared_address;

template <typename T>
void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
inline void mma_16x8x16<BFloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  cuda_on_host::mma_16x8x16(cuda_on_host::Float16Kind::kBFloat16, d, a, b);
}
template <>
inline void mma_16x8x16<Float16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  cuda_on_host::mma_16x8x16(cuda_on_host::Float16Kind::kFloat16, d, a, b);
}

inline void load_matrices(uint32_t (&r)[4], const void* row) {
  cuda_on_host::load_matrices(r, row, /*transposed=*/false);
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  cuda_on_host::load_matrices(r, row, /*transposed=*/true);
}

// ---- asynchronous copies

inline void copy_16_async(void* to_shared, const void* from, bool valid = true) {
  cuda_on_host::copy_16_async(to_shared, from, valid);
}
using cuda_on_host::commit_copies;
template <int kPending>
void wait_copies() {
  cuda_on_host::wait_copies(kPending);
}

// ---- barriers of a part of the block

inline void barrier_sync(int id, int threads) {
  cuda_on_host::barrier_sync(static_cast<uint32_t>(id), static_cast<uint32_t>(threads));
}
inline void barrier_arrive(int id, int threads) {
  cuda_on_host::barrier_arrive(static_cast<uint32_t>(id), static_cast<uint32_t>(threads));
}

// ---- mbarriers and bulk copies (sm_90)

using cuda_on_host::copy_bulk_async;
inline bool has_bulk_copies() { return cuda_on_host::options().compute_capability >= 90; }
using cuda_on_host::fence_async_proxy;
using cuda_on_host::mbarrier_arrive;
using cuda_on_host::mbarrier_arrive_expect;
using cuda_on_host::mbarrier_init;
using cuda_on_host::mbarrier_wait;

// ---- wgmma (sm_90a)

inline bool has_wgmma() { return cuda_on_host::options().compute_capability == 90; }
// Here a thread has all the registers that it wants.
template <int kRegisters>
void keep_registers() {}
template <int kRegisters>
void take_registers() {}
using cuda_on_host::wgmma_commit;
using cuda_on_host::wgmma_fence;
template <int kPending>
void wgmma_wait() {
  cuda_on_host::wgmma_wait(kPending);
}

inline uint64_t wgmma_matrix(const void* p, int column_block_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | static_cast<uint64_t>(column_block_bytes / 16) << 16 |
         (shared_address(p) & 0x3ffff) / 16;
}

enum class WgmmaB { kRows, kColumns };

template <typename T, WgmmaB kB, int kBlocks>
void wgmma(float (&d)[kBlocks][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(kBlocks == 8 || kBlocks == 16);
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  constexpr auto kType = std::is_same_v<T, BFloat16> ? cuda_on_host::Float16Kind::kBFloat16
                                                     : cuda_on_host::Float16Kind::kFloat16;
  cuda_on_host::wgmma({kType, kB == WgmmaB::kRows, kBlocks}, &d[0][0], a, b, accumulate);
}

}  // namespace device
}  // namespace vllm_lite
