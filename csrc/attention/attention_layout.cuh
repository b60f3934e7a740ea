// A tile of the cache in shared memory, [64 keys][head_size] in chunks of 16 bytes, and the copies
// that fill it.
#pragma once

#include "attention/attention_plan.h"
#include "core/device.h"

namespace vllm_lite {
namespace attention {

constexpr uint32_t kWholeWarp = 0xffffffffu;
constexpr int kHalfTile = kTileTokens / 2;
// A key outside the item, whose place in shared memory is filled with zeros: 0 * NaN is NaN.
constexpr uint32_t kNoRow = 0xffffffffu;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % 32; }

// For mma.sync: rows are an odd number of chunks apart, so that the eight rows of an ldmatrix are
// in eight different bank groups.
template <typename Kv, int kHeadSize>
struct PaddedLayout {
  static constexpr int kRowBytes = kHeadSize * static_cast<int>(sizeof(Kv));
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kStride = kChunks | 1;
  static constexpr int kBytes = (kTileTokens * kStride - (kStride - kChunks)) * 16;

  static __device__ __forceinline__ int offset(int row, int chunk) {
    return (row * kStride + chunk) * 16;
  }
};

// For wgmma: device::wgmma_matrix. Without bank conflicts for ldmatrix, too.
template <typename T, int kHeadSize>
struct SwizzledLayout {
  static constexpr int kRowBytes = kHeadSize * static_cast<int>(sizeof(T));
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kColumnBlockBytes = kTileTokens * 128;
  static constexpr int kBytes = kTileTokens * kRowBytes;

  static __device__ __forceinline__ int offset(int row, int chunk) {
    return chunk / 8 * kColumnBlockBytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
  }
};

// Asks for rows first_row .. first_row + kRows - 1 of a tile, of which lane i has the cache row of
// first_row + i; to be committed and waited for.
template <typename Layout, int kRows>
__device__ __forceinline__ void copy_rows(unsigned char* tile, int first_row,
                                          const unsigned char* cache, uint32_t lane_row) {
  constexpr uint32_t kChunks = Layout::kChunks, kCount = kRows * kChunks;
  const auto lane = static_cast<uint32_t>(device::opaque(lane_index()));
#pragma unroll 4
  for (uint32_t i = 0; i < (kCount + 31) / 32; ++i) {
    // Unsigned: to divide a signed number by a power of two takes five instructions, not one.
    const uint32_t index = i * 32 + lane;
    const int row = static_cast<int>(index / kChunks), chunk = static_cast<int>(index % kChunks);
    const uint32_t cache_row = __shfl_sync(kWholeWarp, lane_row, row % kRows);
    if (kCount % 32 != 0 && index >= kCount) continue;
    const bool valid = cache_row != kNoRow;
    device::copy_16_async(
        tile + Layout::offset(first_row + row, chunk),
        cache + (valid ? static_cast<uint64_t>(cache_row) : 0) * Layout::kRowBytes + chunk * 16,
        valid);
  }
}

// The same of 32 rows in whole rows, which are there when the mbarrier's phase, of 32 arrivals,
// ends.
template <typename Layout>
__device__ __forceinline__ void copy_rows_bulk(unsigned char* tile, int first_row,
                                               const unsigned char* cache, uint32_t lane_row,
                                               uint64_t* barrier) {
  unsigned char* to = tile + Layout::offset(first_row + lane_index(), 0);
  if (lane_row != kNoRow) {
    device::mbarrier_arrive_expect(barrier, Layout::kRowBytes);
    device::copy_bulk_async(to, cache + static_cast<uint64_t>(lane_row) * Layout::kRowBytes,
                            Layout::kRowBytes, barrier);
    return;
  }
#pragma unroll
  for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
    *reinterpret_cast<uint4*>(to + chunk * 16) = make_uint4(0, 0, 0, 0);
  }
  device::fence_async_proxy();  // the next copy comes after the zeros
  device::mbarrier_arrive(barrier);
}

}  // namespace attention
}  // namespace vllm_lite
