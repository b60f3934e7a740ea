#include <cstdio>
#include <mutex>
#include <vector>

#include "attention/attention_instructions.h"
#include "attention/attention_tile.cuh"

namespace vllm_lite {
namespace attention {
namespace {

constexpr int kProbeHead = 64, kProbeTiles = 32, kProbeThreads = 128;
constexpr uint32_t kHasBulkCopies = 1, kHasWgmma = 2, kSumsDiffer = 4;

// Two values of either sign and of sizes between 2^-7 and 2^8, in both 16-bit types.
template <typename T>
__device__ __forceinline__ uint32_t random_pair(uint32_t seed) {
  const auto value = [](uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    x ^= x >> 16;
    const uint32_t exponent = 127 - 7 + (x >> 23 & 15);
    return __uint_as_float((x & 0x80000000u) | exponent << 23 | (x & 0x7fffffu));
  };
  return device::pack<T>(value(2 * seed), value(2 * seed + 1));
}

// Whether scores and sums of random tiles are the same in every bit by either instruction.
template <typename T>
__device__ __forceinline__ bool sums_differ(unsigned char* tile) {
  using Layout = SwizzledLayout<T, kProbeHead>;
  WarpRows<T, T, kProbeHead, true, Layout> rows[2];
  const uint32_t thread = threadIdx.x;
  bool differ = false;
  const auto compare = [&](const auto& a, const auto& b) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        differ = differ || __float_as_uint(a[i][j]) != __float_as_uint(b[i][j]);
      }
    }
  };
  rows[0].begin_range();
  rows[1].begin_range();
#pragma unroll 1
  for (uint32_t t = 0; t < kProbeTiles; ++t) {
    __syncthreads();
    for (uint32_t i = thread; i < Layout::kBytes / 4; i += kProbeThreads) {
      reinterpret_cast<uint32_t*>(tile)[i] = random_pair<T>(t * 4096 + i);
    }
    device::fence_async_proxy();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t seed = 0x100000u + ((t * kProbeThreads + thread) * 4 + i) * 4 + j;
        rows[0].query[i][j] = rows[1].query[i][j] = random_pair<T>(seed);
        rows[0].weights[i][j] = rows[1].weights[i][j] = random_pair<T>(seed + 0x100000u);
      }
    }
    rows[0].template score<0>(tile);
    rows[0].template score<1>(tile);
    rows[0].template add_values<0>(tile, 0, false);
    rows[0].template add_values<1>(tile, 0, false);
    rows[1].score_async(tile);
    rows[1].add_values_async(tile);
    device::wgmma_wait<0>();
    compare(rows[0].scores, rows[1].scores);
    compare(rows[0].sums, rows[1].sums);
  }
  return differ;
}

__global__ void __launch_bounds__(kProbeThreads) probe_kernel(uint32_t* found) {
  VL_DYNAMIC_SHARED(unsigned char, tile);
  uint32_t bits = device::has_bulk_copies() ? kHasBulkCopies : 0;
  if (device::has_wgmma()) {
    const bool differ = sums_differ<BFloat16>(tile) || sums_differ<Float16>(tile);
    bits |= kHasWgmma | (differ ? kSumsDiffer : 0);
  }
  atomicOr(found, bits);
}

Instructions probe(const PagedAttentionParams& params) {
  uint32_t found = 0;
  device::fill_async(params.workspace, 0, sizeof(found), params.stream);
  VL_LAUNCH(probe_kernel, 1, kProbeThreads, (SwizzledLayout<BFloat16, kProbeHead>::kBytes),
            params.stream, reinterpret_cast<uint32_t*>(params.workspace));
  device::copy_async(&found, params.workspace, sizeof(found), params.stream);
  device::synchronize(params.stream);
  if ((found & kSumsDiffer) != 0) {
    std::fputs("vllm_lite: wgmma and mma.sync sum differently on this device; wgmma is not used\n",
               stderr);
  }
  return {(found & kHasBulkCopies) != 0, (found & (kHasWgmma | kSumsDiffer)) == kHasWgmma};
}

}  // namespace

Instructions attention_instructions(const PagedAttentionParams& params) {
  struct Known {
    int device;
    Instructions instructions;
  };
  static std::mutex mutex;
  static std::vector<Known> devices;
  if (!hopper_allowed.load(std::memory_order_relaxed)) return {false, false};
  const int current = device::current_device();
  const std::lock_guard lock(mutex);
  for (const Known& known : devices) {
    if (known.device == current) return known.instructions;
  }
  devices.push_back({current, probe(params)});
  return devices.back().instructions;
}

}  // namespace attention

}  // namespace vllm_lite
