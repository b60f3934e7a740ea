// Blocks onto blocks of one cache, all layers in one launch. A thread moves one unit of every pair
// in the order of the list, so that a pair may read what an earlier one wrote.
#include "cache/store_kv.h"
#include "core/chunk.h"

namespace vllm_lite {
namespace {

using namespace device;

constexpr int kThreads = 256;
// Pairs whose loads are on their way together.
constexpr int kPairs = 4;

// Unit: 16 bytes or, where blocks are not made of those, one.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(const __grid_constant__ CopyBlocksParams p, int64_t units_per_block) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.num_layers * units_per_block) return;
  Unit* layer = static_cast<Unit*>(p.kv_cache) +
                index / units_per_block * p.num_blocks * units_per_block + index % units_per_block;
  for (int begin = 0; begin < p.num_pairs; begin += kPairs) {
    int64_t from[kPairs], to[kPairs];  // to < 0: nothing to copy
    bool chained = false;              // a source is an earlier destination of these pairs
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const bool exists = begin + i < p.num_pairs;
      from[i] = exists ? p.block_pairs[2 * (begin + i)] : -1;
      to[i] = exists ? p.block_pairs[2 * (begin + i) + 1] : -1;
      if (from[i] < 0 || from[i] >= p.num_blocks || to[i] >= p.num_blocks) to[i] = -1;
      for (int j = 0; j < i; ++j) chained |= to[j] >= 0 && to[j] == from[i];
    }
    Unit units[kPairs];
    if (chained) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (to[i] >= 0) layer[to[i] * units_per_block] = layer[from[i] * units_per_block];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (to[i] >= 0) units[i] = layer[from[i] * units_per_block];
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (to[i] >= 0) layer[to[i] * units_per_block] = units[i];
      }
    }
  }
}

template <typename Unit>
void launch(const CopyBlocksParams& p) {
  const int64_t units_per_block = p.block_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t blocks = (p.num_layers * units_per_block + kThreads - 1) / kThreads;
  VL_CHECK(blocks <= INT32_MAX, "copy_blocks: a block of all layers is too large");
  VL_LAUNCH((copy_blocks_kernel<Unit>), static_cast<uint32_t>(blocks), kThreads, 0, p.stream, p,
            units_per_block);
}

}  // namespace

void copy_blocks_cuda(const CopyBlocksParams& p) {
  if (p.num_pairs == 0 || p.num_layers == 0 || p.block_bytes == 0) return;
  if (is_aligned<uint8_t>({p.kv_cache}, {p.block_bytes})) return launch<Chunk<uint32_t>>(p);
  launch<uint8_t>(p);
}

}  // namespace vllm_lite
