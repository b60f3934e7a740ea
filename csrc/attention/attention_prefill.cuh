// Prefill: the warps of a block have 16 rows each and share the tiles, which come through a ring of
// slots in the order K, V, K, V, ...; every step waits for one tile, asks for another and uses the
// first.
#pragma once

#include <string>

#include "attention/attention_warp.cuh"

namespace vllm_lite {
namespace attention {

// What fits into the shared memory.
template <int kHeadSize>
constexpr int kPrefillWarps = kHeadSize <= 128 ? 8 : 4;

// Heads whose totals are in local memory on a device with little shared memory (99 KiB per block:
// sm_86, 89 and 120), where with them no block of four warps would fit, and with a 16-bit cache
// none of two. A warp touches its total once per range.
template <int kHeadSize>
constexpr bool kMayHaveLocalTotals = kHeadSize > 128;

// What a block has of the shared memory.
struct PrefillRoom {
  int ring_slots;
  bool local_totals;
};

template <typename T, typename Kv, int kHeadSize>
__host__ __device__ constexpr int prefill_warp_bytes(bool local_totals) {
  using Rows = WarpRows<T, Kv, kHeadSize, true>;
  return Rows::kSharedBytes - (local_totals ? Rows::kTotalBytes : 0);
}

template <typename T, typename Kv, int kHeadSize>
constexpr int prefill_shared_bytes(PrefillRoom room) {
  return room.ring_slots * PaddedLayout<Kv, kHeadSize>::kBytes +
         kPrefillWarps<kHeadSize> * prefill_warp_bytes<T, Kv, kHeadSize>(room.local_totals) +
         static_cast<int>(sizeof(int));
}

// The best that fits. Throws Error if nothing does.
template <typename T, typename Kv, int kHeadSize>
PrefillRoom prefill_room(int available) {
  for (const PrefillRoom room : {PrefillRoom{4, false}, {2, false}}) {
    if (prefill_shared_bytes<T, Kv, kHeadSize>(room) <= available) return room;
  }
  constexpr PrefillRoom kLeast{2, kMayHaveLocalTotals<kHeadSize>};
  constexpr int kNeeded = prefill_shared_bytes<T, Kv, kHeadSize>(kLeast);
  VL_CHECK(kNeeded <= available, "paged_attention: head size " + std::to_string(kHeadSize) +
                                     " needs " + std::to_string(kNeeded) +
                                     " bytes of shared memory per block; this device has " +
                                     std::to_string(available));
  return kLeast;
}

template <typename T, typename Kv, int kHeadSize, bool kPlain>
__global__ void __launch_bounds__(32 * kPrefillWarps<kHeadSize>)
    prefill_kernel(const __grid_constant__ KernelArgs args) {
  using Layout = PaddedLayout<Kv, kHeadSize>;
  constexpr int kWarps = kPrefillWarps<kHeadSize>;
  constexpr int kWarpKeys = kTileTokens / kWarps;  // keys that a warp copies of a tile
  VL_DYNAMIC_SHARED(unsigned char, shared);
  const auto* const cache = static_cast<const unsigned char*>(args.params.kv_cache);
  const int slots = args.ring_slots;
  const int warp_index = static_cast<int>(threadIdx.x) / 32;
  float4 local_total[kMayHaveLocalTotals<kHeadSize> ? kHeadSize / 8 : 1];
  const bool has_local_total = kMayHaveLocalTotals<kHeadSize> && args.local_totals;
  const int warp_bytes = prefill_warp_bytes<T, Kv, kHeadSize>(has_local_total);
  unsigned char* const warp_shared = shared + slots * Layout::kBytes + warp_index * warp_bytes;
  // Whether a key of the pass has no place in the cache.
  int* const found_none =
      reinterpret_cast<int*>(shared + slots * Layout::kBytes + kWarps * warp_bytes);
  // The Hopper kernel's for_each_pass() written out: as its function this would spill 88 bytes more
  // at head size 256.
  const int num_heads = args.params.num_kv_heads;
  const PlanHeader header = plan_header(args);
  const int count = header.num_prefill_items * num_heads;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const ItemView view(args, plan_item(args, header.num_decode_items + i / num_heads),
                        i % num_heads);
    for (int pass = view.item.row_begin; pass < view.row_end(); pass += kWarps * kDecodeRows) {
      __syncthreads();  // the previous pass has been read
      if (threadIdx.x == 0) *found_none = 0;
      __syncthreads();
      KeySpan block_span = KeySpan::seen_by_some<kPlain>(
          args, view, pass, min(pass + kWarps * kDecodeRows, view.row_end()));
      block_span.clip(view.item);
      const int first_row = pass + warp_index * kDecodeRows;
      write_unseen<T, kHeadSize>(args, view, first_row, block_span);
      WarpItem<T, Kv, kHeadSize, kPlain> warp(args, view, first_row, warp_shared,
                                              has_local_total ? local_total : nullptr);
      KeyFinder finder(args, view, block_span);
      const int first_tile = block_span.tile_begin();
      const int num_steps = 2 * (block_span.tile_end() - first_tile);

      // This lane's key of the tile that is asked for, and the table entry of the one after.
      const int lane_key = warp_index * kWarpKeys + lane_index() % kWarpKeys;
      uint32_t row = kNoRow;
      int entry = finder.table_entry(first_tile * kTileTokens + lane_key);
      const auto ask_for = [&](int step) {  // even: the keys of a tile, odd: its values
        if (step < num_steps) {
          if (step % 2 == 0) {
            row = finder.key_row(entry, (first_tile + step / 2) * kTileTokens + lane_key);
            if (finder.found_none) atomicExch(found_none, 1);
            entry = finder.table_entry((first_tile + step / 2 + 1) * kTileTokens + lane_key);
          }
          copy_rows<Layout, kWarpKeys>(shared + (step & (slots - 1)) * Layout::kBytes,
                                       warp_index * kWarpKeys, cache,
                                       step % 2 == 0 ? row : finder.value_row(row));
        }
        device::commit_copies();
      };
      const auto wait_for = [&](int step) {
        if (slots == 2) {
          device::wait_copies<0>();
        } else {
          device::wait_copies<2>();
        }
        __syncthreads();  // the tile is there, and the one before it has been read
        ask_for(step + slots - 1);
        return shared + (step & (slots - 1)) * Layout::kBytes;
      };
      for (int step = 0; step < slots - 1; ++step) ask_for(step);
      for (int step = 0; step < num_steps; step += 2) {
        const int tile = first_tile + step / 2, start = tile * kTileTokens;
        const bool sees_tile = warp.span.meets(tile), is_masked = warp.is_masked(start);
        const unsigned char* keys = wait_for(step);
        if (sees_tile) {
          warp.rows.template score<0>(keys);
          warp.rows.template score<1>(keys);
          warp.rows.softmax(start, is_masked);
          warp.rows.take_weights();
        }
        const unsigned char* values = wait_for(step + 1);
        if (sees_tile) {
          warp.rows.template add_values<0>(values, start, is_masked);
          warp.rows.template add_values<1>(values, start, is_masked);
        }
        const bool is_last = step + 2 == num_steps;
        if (is_last || (tile + 1) % kRangeTiles == 0) {
          const int any = lane_index() == 0 ? atomicOr(found_none, 0) : 0;
          warp.finish_range(tile / kRangeTiles, is_last, __shfl_sync(kWholeWarp, any, 0) != 0);
        }
      }
    }
  }
}

template <typename T, typename Kv, int kHeadSize, bool kPlain>
void launch_prefill(KernelArgs args) {
  constexpr int kThreads = 32 * kPrefillWarps<kHeadSize>;
  static const PrefillRoom room =
      prefill_room<T, Kv, kHeadSize>(device::max_dynamic_shared_bytes());
  const int shared_bytes = prefill_shared_bytes<T, Kv, kHeadSize>(room);
  static const int blocks =
      persistent_blocks(prefill_kernel<T, Kv, kHeadSize, kPlain>, kThreads, shared_bytes);
  args.ring_slots = room.ring_slots;
  args.local_totals = room.local_totals;
  VL_LAUNCH((prefill_kernel<T, Kv, kHeadSize, kPlain>), blocks, kThreads, shared_bytes,
            args.params.stream, args);
}

}  // namespace attention
}  // namespace vllm_lite
