// Prefill with wgmma (sm_90a): a warp copies tiles into a ring of slots, in the order K, V, K, V,
// ...; two warpgroups of 64 rows each work on them, at their own pace. While the scores of the next
// tile and the values of this one are under way, a group turns the next scores into weights.
//
// The tiles, ranges and the order of every sum are those of the other kernels, and so are the bits
// wherever wgmma sums as mma.sync does; attention_instructions() has seen whether it does.
#pragma once

#include "attention/attention_warp.cuh"

namespace vllm_lite {
namespace attention {

constexpr int kGroupRows = 64;
constexpr int kGroupWarps = kGroupRows / kDecodeRows;
constexpr int kConsumerWarps = kPrefillRows / kDecodeRows;
constexpr int kHopperThreads = 32 * (kConsumerWarps + kGroupWarps);  // of the last group one works
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
constexpr int kHopperSlots = 8;
// Slots that the producer fills before it waits for the copies of the first of them.
constexpr int kCopyLag = 3;

// The same for all lanes, and known to be.
__device__ __forceinline__ int uniform_warp_index() {
  return __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0);
}

template <typename T, int kHeadSize>
struct HopperShared {
  using Layout = SwizzledLayout<T, kHeadSize>;
  using Rows = WarpRows<T, T, kHeadSize, true, Layout>;
  static constexpr int kRows = kHopperSlots * Layout::kBytes;
  static constexpr int kBarriers = kRows + kConsumerWarps * Rows::kSharedBytes;
  static constexpr int kFlags = kBarriers + 2 * kHopperSlots * static_cast<int>(sizeof(uint64_t));
  static constexpr int kBytes = kFlags + kHopperSlots * static_cast<int>(sizeof(int));
};

// The ring as either side sees it. Steps are counted through the whole kernel: step s fills slot
// s % kHopperSlots, for the (s / kHopperSlots)-th time.
template <typename Layout>
struct TileRing {
  unsigned char* tiles;
  uint64_t* full;   // 32 arrivals: the producer's lanes
  uint64_t* empty;  // kConsumerWarps arrivals
  int* found_none;  // per slot: a key of the pass, up to this tile, has no place in the cache

  static __device__ __forceinline__ int slot(uint32_t step) {
    return static_cast<int>(step % kHopperSlots);
  }
  static __device__ __forceinline__ void wait(uint64_t* barriers, uint32_t step) {
    device::mbarrier_wait(barriers + slot(step), step / kHopperSlots & 1);
    __syncwarp();
  }
  __device__ __forceinline__ unsigned char* tile(uint32_t step) const {
    return tiles + slot(step) * Layout::kBytes;
  }
  __device__ __forceinline__ const unsigned char* wait_full(uint32_t step) const {
    wait(full, step);
    return tile(step);
  }
  __device__ __forceinline__ void release(uint32_t step) const {
    __syncwarp();
    if (lane_index() == 0) device::mbarrier_arrive(empty + slot(step));
  }
};

// The producer's side.
template <typename Layout>
struct TileProducer {
  const TileRing<Layout>& ring;
  const unsigned char* cache;
  uint32_t step;  // the next to be filled

  // The tiles of a pass.
  __device__ __forceinline__ void fill_pass(const KernelArgs& args, const ItemView& view,
                                            const KeySpan& span) {
    KeyFinder finder(args, view, span);
    for (int tile = span.tile_begin(); tile < span.tile_end(); ++tile) {
      uint32_t rows[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int position = tile * kTileTokens + h * kHalfTile + lane_index();
        rows[h] = finder.key_row(finder.table_entry(position), position);
      }
      const bool found_none = __any_sync(kWholeWarp, finder.found_none) != 0;
      fill(rows, found_none);
      const uint32_t value_rows[2] = {finder.value_row(rows[0]), finder.value_row(rows[1])};
      fill(value_rows, found_none);
    }
  }
  // What is still on its way when there is no more to fill.
  __device__ __forceinline__ void finish() {
    for (uint32_t s = step > kCopyLag ? step - kCopyLag : 0; s < step; ++s) publish<0>(s);
  }

 private:
  // Rows: of keys lane and lane + 32 of the tile.
  __device__ __forceinline__ void fill(const uint32_t (&rows)[2], bool found_none) {
    if (step >= kHopperSlots) ring.wait(ring.empty, step - kHopperSlots);
    if (lane_index() == 0) ring.found_none[ring.slot(step)] = found_none;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      copy_rows<Layout, kHalfTile>(ring.tile(step), h * kHalfTile, cache, rows[h]);
    }
    device::commit_copies();
    ++step;
    if (step > kCopyLag) publish<kCopyLag>(step - 1 - kCopyLag);
  }
  template <int kPending>
  __device__ __forceinline__ void publish(uint32_t filled) {
    device::wait_copies<kPending>();
    device::fence_async_proxy();
    device::mbarrier_arrive(ring.full + ring.slot(filled));
  }
};

template <typename T, int kHeadSize, bool kPlain>
__device__ __forceinline__ void consume_pass(const TileRing<SwizzledLayout<T, kHeadSize>>& ring,
                                             uint32_t step, const KernelArgs& args,
                                             const ItemView& view, int pass, int warp_index,
                                             const KeySpan& block_span,
                                             unsigned char* warp_shared) {
  const int first_row = pass + warp_index * kDecodeRows;
  const int group_begin = pass + warp_index / kGroupWarps * kGroupRows;
  const int group_end = min(group_begin + kGroupRows, view.row_end());
  const int first_tile = block_span.tile_begin(), tile_end = block_span.tile_end();
  write_unseen<T, kHeadSize>(args, view, first_row, block_span);
  if (group_begin >= group_end) {
    for (int i = 0; i < 2 * (tile_end - first_tile); ++i) {
      ring.wait_full(step + i);
      ring.release(step + i);
    }
    return;
  }
  if (first_tile == tile_end) return;
  const KeySpan seen_by_group = KeySpan::seen_by_all<kPlain>(args, view, group_begin, group_end);
  WarpItem<T, T, kHeadSize, kPlain, SwizzledLayout<T, kHeadSize>> warp(args, view, first_row,
                                                                       warp_shared);
  auto& rows = warp.rows;
  const auto score = [&](uint32_t keys_step, int start) {
    rows.score_async(ring.wait_full(keys_step));
    device::wgmma_wait<0>();
    ring.release(keys_step);
    rows.softmax(start, warp.is_masked(start));
  };
  score(step, first_tile * kTileTokens);
  rows.take_weights();
  for (int tile = first_tile; tile < tile_end; ++tile, step += 2) {
    const int start = tile * kTileTokens, next = start + kTileTokens;
    const bool is_last = tile + 1 == tile_end;
    const bool ends_range = is_last || (tile + 1) % kRangeTiles == 0;
    const unsigned char* values = ring.wait_full(step + 1);
    const bool row_by_row =
        !seen_by_group.covers(start) && !(rows.are_finite(values, 0) && rows.are_finite(values, 1));
    if (!ends_range && !row_by_row) {
      rows.score_async(ring.wait_full(step + 2));
      rows.add_values_async(values);
      device::wgmma_wait<1>();
      ring.release(step + 2);
      rows.softmax(next, warp.is_masked(next));
      device::wgmma_wait<0>();
      ring.release(step + 1);
      rows.take_weights();
      continue;
    }
    if (row_by_row) {
      rows.template add_values_row_by_row<0>(values, start);
      rows.template add_values_row_by_row<1>(values, start);
    } else {
      rows.add_values_async(values);
      device::wgmma_wait<0>();
    }
    const bool found_none = ring.found_none[ring.slot(step + 1)] != 0;
    ring.release(step + 1);
    if (ends_range) warp.finish_range(tile / kRangeTiles, is_last, found_none);
    if (is_last) break;
    score(step + 2, next);
    rows.take_weights();
  }
}

// function(view, pass, span) for each 128 rows of the block's items; span: the keys that they see.
template <bool kPlain, typename Function>
__device__ __forceinline__ void for_each_pass(const KernelArgs& args, const Function& function) {
  const int num_heads = args.params.num_kv_heads;
  const PlanHeader header = plan_header(args);
  const int count = header.num_prefill_items * num_heads;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const ItemView view(args, plan_item(args, header.num_decode_items + i / num_heads),
                        i % num_heads);
    for (int pass = view.item.row_begin; pass < view.row_end(); pass += kPrefillRows) {
      KeySpan span =
          KeySpan::seen_by_some<kPlain>(args, view, pass, min(pass + kPrefillRows, view.row_end()));
      span.clip(view.item);
      function(view, pass, span);
    }
  }
}

// KV of the query's type.
template <typename T, int kHeadSize, bool kPlain>
__global__ void __launch_bounds__(kHopperThreads, 1)
    hopper_prefill_kernel(const __grid_constant__ KernelArgs args) {
  using Shared = HopperShared<T, kHeadSize>;
  using Layout = typename Shared::Layout;
  VL_DYNAMIC_SHARED(unsigned char, shared);
  auto* const barriers = reinterpret_cast<uint64_t*>(shared + Shared::kBarriers);
  const TileRing<Layout> ring{shared, barriers, barriers + kHopperSlots,
                              reinterpret_cast<int*>(shared + Shared::kFlags)};
  if (threadIdx.x < kHopperSlots) {
    device::mbarrier_init(ring.full + threadIdx.x, 32);
    device::mbarrier_init(ring.empty + threadIdx.x, kConsumerWarps);
  }
  __syncthreads();
  const int warp_index = uniform_warp_index();
  if (warp_index >= kConsumerWarps) {
    device::keep_registers<kProducerRegisters>();
    if (warp_index > kConsumerWarps) return;
    TileProducer<Layout> producer{ring, static_cast<const unsigned char*>(args.params.kv_cache), 0};
    for_each_pass<kPlain>(args, [&](const ItemView& view, int, const KeySpan& span) {
      producer.fill_pass(args, view, span);
    });
    producer.finish();
    return;
  }
  device::take_registers<kConsumerRegisters>();
  unsigned char* const warp_shared =
      shared + Shared::kRows + warp_index * Shared::Rows::kSharedBytes;
  uint32_t step = 0;
  for_each_pass<kPlain>(args, [&](const ItemView& view, int pass, const KeySpan& span) {
    consume_pass<T, kHeadSize, kPlain>(ring, step, args, view, pass, warp_index, span, warp_shared);
    step += 2 * (span.tile_end() - span.tile_begin());
  });
}

template <typename T, int kHeadSize, bool kPlain>
void launch_hopper_prefill(const KernelArgs& args) {
  constexpr auto kKernel = hopper_prefill_kernel<T, kHeadSize, kPlain>;
  constexpr int kShared = HopperShared<T, kHeadSize>::kBytes;
  static const int blocks = persistent_blocks(kKernel, kHopperThreads, kShared);
  VL_LAUNCH(kKernel, blocks, kHopperThreads, kShared, args.params.stream, args);
}

}  // namespace attention
}  // namespace vllm_lite
