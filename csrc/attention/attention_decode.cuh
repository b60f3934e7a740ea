// Decode: a warp is a block of its own, with an item of at most 16 rows. It keeps one tile of keys
// and one of values in flight, in halves of 32 keys: where a half has been read, the same half of
// the next tile is asked for. No barrier but those of the warp; as many warps as shared memory
// holds run on a multiprocessor, each with 3/4 of its KV buffer under way (head size 128, bf16: 5
// warps, 120 KiB).
#pragma once

#include "attention/attention_warp.cuh"

namespace vllm_lite {
namespace attention {

// The four halves in shared memory, numbered in the order of their use: two of keys, two of values.
// Each is asked for once per tile.
//
// In chunks of 16 bytes, by all lanes (sm_80); or, kBulk, in whole rows, by a lane each (sm_90): a
// copy takes one instruction where the chunks of a head of 128 take 16.
template <typename Layout, bool kBulk>
struct HalfCopies {
  static constexpr int kHalves = 4;

  uint64_t* barriers;  // [kHalves]
  uint32_t parity;     // of the tile in use

  __device__ __forceinline__ explicit HalfCopies(uint64_t* shared) : barriers(shared), parity(0) {
    if (!kBulk) return;
    if (lane_index() < kHalves) device::mbarrier_init(barriers + lane_index(), 32);
    __syncwarp();
  }
  __device__ __forceinline__ void ask(int half, unsigned char* tile, const unsigned char* cache,
                                      uint32_t row) {
    if constexpr (kBulk) {
      copy_rows_bulk<Layout>(tile, half % 2 * kHalfTile, cache, row, barriers + half);
    } else {
      copy_rows<Layout, kHalfTile>(tile, half % 2 * kHalfTile, cache, row);
    }
  }
  // After every half, asked for or not.
  __device__ __forceinline__ void end_ask() {
    if (!kBulk) device::commit_copies();
  }
  __device__ __forceinline__ void wait(int half) {
    if constexpr (kBulk) {
      device::mbarrier_wait(barriers + half, parity);
    } else {
      device::wait_copies<kHalves - 1>();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void next_tile() { parity ^= 1; }
};

template <typename T, typename Kv, int kHeadSize>
struct DecodeShared {
  static constexpr int kTile = PaddedLayout<Kv, kHeadSize>::kBytes;
  static constexpr int kRows = 2 * kTile;
  static constexpr int kBarriers = kRows + WarpRows<T, Kv, kHeadSize, true>::kSharedBytes;
  static constexpr int kBytes = kBarriers + 4 * static_cast<int>(sizeof(uint64_t));
};

template <typename T, typename Kv, int kHeadSize, bool kPlain, bool kBulk>
__global__ void __launch_bounds__(32) decode_kernel(const __grid_constant__ KernelArgs args) {
  using Layout = PaddedLayout<Kv, kHeadSize>;
  using Shared = DecodeShared<T, Kv, kHeadSize>;
  VL_DYNAMIC_SHARED(unsigned char, shared);
  unsigned char* const keys = shared;
  unsigned char* const values = shared + Shared::kTile;
  HalfCopies<Layout, kBulk> copies(reinterpret_cast<uint64_t*>(shared + Shared::kBarriers));
  const auto* const cache = static_cast<const unsigned char*>(args.params.kv_cache);
  const int lane = lane_index();
  const int num_heads = args.params.num_kv_heads;
  const int count = plan_header(args).num_decode_items * num_heads;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const ItemView view(args, plan_item(args, i / num_heads), i % num_heads);
    const int num_item_rows = view.row_end() - view.item.row_begin;
    if (num_item_rows <= 0 || num_item_rows > kDecodeRows) continue;
    KeySpan span = KeySpan::seen_by_some<kPlain>(args, view, view.item.row_begin, view.row_end());
    span.clip(view.item);
    write_unseen<T, kHeadSize>(args, view, view.item.row_begin, span);
    const int tile_end = span.tile_end();
    int tile = span.tile_begin();
    if (tile >= tile_end) continue;
    WarpItem<T, Kv, kHeadSize, kPlain> warp(args, view, view.item.row_begin,
                                            shared + Shared::kRows);
    KeyFinder finder(args, view, span);

    uint32_t row[2];  // of the tile that is asked for
    int entry[2];     // of the tile after that
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = tile * kTileTokens + h * kHalfTile + lane;
      row[h] = finder.key_row(finder.table_entry(position), position);
      copies.ask(h, keys, cache, row[h]);
      copies.end_ask();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      copies.ask(2 + h, values, cache, finder.value_row(row[h]));
      copies.end_ask();
      entry[h] = finder.table_entry((tile + 1) * kTileTokens + h * kHalfTile + lane);
    }
    for (; tile < tile_end; ++tile) {
      const int start = tile * kTileTokens;
      const bool has_next = tile + 1 < tile_end;
      const bool is_masked = warp.is_masked(start);
      const auto use_keys = [&](auto half) {
        constexpr int kHalf = decltype(half)::value;
        copies.wait(kHalf);
        warp.rows.template score<kHalf>(keys);
        __syncwarp();
        if (has_next) {
          const int position = start + kTileTokens + kHalf * kHalfTile + lane;
          row[kHalf] = finder.key_row(entry[kHalf], position);
          copies.ask(kHalf, keys, cache, row[kHalf]);
        }
        copies.end_ask();
      };
      const auto use_values = [&](auto half) {
        constexpr int kHalf = decltype(half)::value;
        copies.wait(2 + kHalf);
        warp.rows.template add_values<kHalf>(values, start, is_masked);
        __syncwarp();
        if (has_next) {
          copies.ask(2 + kHalf, values, cache, finder.value_row(row[kHalf]));
          entry[kHalf] = finder.table_entry(start + 2 * kTileTokens + kHalf * kHalfTile + lane);
        }
        copies.end_ask();
      };
      use_keys(Half<0>{});
      use_keys(Half<1>{});
      warp.rows.softmax(start, is_masked);
      warp.rows.take_weights();
      use_values(Half<0>{});
      use_values(Half<1>{});
      copies.next_tile();
      if (!has_next || (tile + 1) % kRangeTiles == 0) {
        warp.finish_range(tile / kRangeTiles, !has_next,
                          __any_sync(kWholeWarp, finder.found_none) != 0);
      }
    }
  }
}

template <typename T, typename Kv, int kHeadSize, bool kPlain, bool kBulk>
void launch_decode(const KernelArgs& args) {
  constexpr auto kKernel = decode_kernel<T, Kv, kHeadSize, kPlain, kBulk>;
  constexpr int kShared = DecodeShared<T, Kv, kHeadSize>::kBytes;
  static const int blocks = persistent_blocks(kKernel, 32, kShared);
  VL_LAUNCH(kKernel, blocks, 32, kShared, args.params.stream, args);
}

}  // namespace attention
}  // namespace vllm_lite
