// Paged attention on CUDA: the decode and the prefill kernel of one head size.
//
// Decode: a warp is a block of its own, with an item of at most 16 rows. It keeps one tile of keys
// and one of values in flight, in halves of 32 keys: where a half has been read, the same half of
// the next tile is asked for. No barrier but those of the warp; as many warps as shared memory
// holds run on a multiprocessor, each with 3/4 of its KV buffer under way (head size 128, bf16: 5
// warps, 120 KiB).
//
// Prefill: the warps of a block have 16 rows each and share the tiles, which come through a ring of
// slots in the order K, V, K, V, ...; every step waits for one tile, asks for another and uses the
// first.
//
// Both kernels are persistent: as many blocks as run at once, which read how many items there are
// from the plan in device memory, so that a captured graph serves steps of different make-up.
#pragma once

#include <string>
#include <type_traits>

#include "attention/attention_item.cuh"

namespace vllm_lite {
namespace attention {

constexpr int kRangeTiles = kRangeTokens / kTileTokens;
template <int kIndex>
using Half = std::integral_constant<int, kIndex>;

// Where a warp's rows stand, and what becomes of their results.
template <typename T, typename Kv, int kHeadSize, bool kPlain>
struct WarpItem {
  using Rows = WarpRows<T, Kv, kHeadSize, kPlain>;

  const KernelArgs& args;
  const ItemView& view;
  int first_row;  // of the warp
  KeySpan span;   // of the warp
  KeySpan seen_by_all;
  Rows rows;
  bool has_total;

  __device__ __forceinline__ WarpItem(const KernelArgs& kernel_args, const ItemView& item_view,
                                      int warp_row, unsigned char* shared)
      : args(kernel_args),
        view(item_view),
        first_row(warp_row),
        span(kernel_args, item_view, warp_row, min(warp_row + kDecodeRows, item_view.row_end())),
        seen_by_all(span),
        has_total(false) {
    if (warp_row < view.row_end()) {
      const int last = min(warp_row + kDecodeRows, view.row_end()) - 1;
      seen_by_all.begin = KeySpan::window_begin(args, view.position(args, last));
      seen_by_all.end = view.position(args, warp_row) + 1;
    }
    span.clip(view.item);
    rows.begin(shared);
    rows.factors = args.factors;
    const T* query[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane_row(h);
      const bool exists = row < view.row_end();
      query[h] = exists ? static_cast<const T*>(args.params.query) +
                              view.element(args, row, args.params.query_token_stride)
                        : nullptr;
      rows.position[h] = exists ? view.position(args, row) : -1;
      rows.seen_begin[h] = KeySpan::window_begin(args, rows.position[h]);
      rows.slope[h] = 0;
      if (!kPlain && exists && args.params.alibi_slopes != nullptr) {
        const int head = view.kv_head * args.group + row % args.group;
        rows.slope[h] = __ldg(args.params.alibi_slopes + head) * args.factors.slope;
      }
    }
    rows.load_query(query);
    rows.begin_range();
  }

  __device__ __forceinline__ int lane_row(int h) const {
    return first_row + lane_index() / 4 + 8 * h;
  }
  // Whether some row does not see all of the tile.
  __device__ __forceinline__ bool is_masked(int start) const {
    return start + kTileTokens > seen_by_all.end || start < seen_by_all.begin;
  }

  // After the last tile of a range. found_none: a key was not found, for this warp or another.
  __device__ __forceinline__ void finish_range(int range, bool is_last, bool found_none) {
    rows.finish_range();
    if (found_none) rows.weight[0] = rows.weight[1] = not_a_number();
    if (view.item.partial >= 0) {
      write_partial(range);
    } else {
      if (has_total) rows.merge_total();
      has_total = true;
      if (is_last) {
        write_out();
      } else {
        rows.keep_total();
      }
    }
    if (!is_last) rows.begin_range();
  }

 private:
  __device__ __forceinline__ void write_out() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane_row(h);
      if (row >= view.row_end()) continue;
      T* out =
          static_cast<T*>(args.params.out) + view.element(args, row, args.params.out_token_stride);
      const float factor = inverse(rows.weight[h], args.value_factor);
#pragma unroll
      for (int p = 0; p < Rows::kBlocks; ++p) {
        const float2 x = rows.value_pair(p, h);
        *reinterpret_cast<uint32_t*>(out + Rows::value_column(p)) =
            device::pack<T>(result(x.x, factor), result(x.y, factor));
      }
    }
  }
  __device__ __forceinline__ void write_partial(int range) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane_row(h);
      if (row >= view.row_end()) continue;
      const int64_t partial = view.partial_row(range, row);
      if (lane_index() % 4 == 0) {
        *view.partial_state(args, partial) = make_float2(rows.maximum[h], rows.weight[h]);
      }
      float* to = view.partial_sums(args, partial);
#pragma unroll
      for (int p = 0; p < Rows::kBlocks; ++p) {
        *reinterpret_cast<float2*>(to + Rows::value_column(p)) = rows.value_pair(p, h);
      }
    }
  }
};

// By a warp, for its rows from row_begin on: the results of what none of the item's rows sees.
// That is the item, where `span` is empty; and ranges of a split one, where it was planned without
// the window.
template <typename T, int kHeadSize>
__device__ __forceinline__ void write_unseen(const KernelArgs& args, const ItemView& view,
                                             int row_begin, const KeySpan& span) {
  const int lane = lane_index(), row_end = min(row_begin + kDecodeRows, view.row_end());
  if (view.item.partial < 0) {
    if (span.begin < span.end) return;
    for (int row = row_begin; row < row_end; ++row) {
      T* out =
          static_cast<T*>(args.params.out) + view.element(args, row, args.params.out_token_stride);
      for (int d = lane; d < kHeadSize; d += 32) out[d] = T{};
    }
    return;
  }
  for (int range = view.item.range_begin; range < view.item.range_end; ++range) {
    const int begin = range * kRangeTokens;
    if (max(begin, span.begin) < min(begin + kRangeTokens, span.end)) continue;
    for (int row = row_begin; row < row_end; ++row) {
      const int64_t partial = view.partial_row(range, row);
      if (lane == 0) *view.partial_state(args, partial) = make_float2(-infinity(), 0);
      for (int d = lane; d < kHeadSize; d += 32) view.partial_sums(args, partial)[d] = 0;
    }
  }
}

// ---- decode

template <typename T, typename Kv, int kHeadSize>
constexpr int decode_shared_bytes() {
  return 2 * TileLayout<Kv, kHeadSize>::kBytes + WarpRows<T, Kv, kHeadSize, true>::kSharedBytes;
}

template <typename T, typename Kv, int kHeadSize, bool kPlain>
__global__ void __launch_bounds__(32) decode_kernel(const __grid_constant__ KernelArgs args) {
  using Layout = TileLayout<Kv, kHeadSize>;
  VL_DYNAMIC_SHARED(unsigned char, shared);
  unsigned char* const keys = shared;
  unsigned char* const values = shared + Layout::kBytes;
  const auto* const cache = static_cast<const unsigned char*>(args.params.kv_cache);
  const int lane = lane_index();
  const int num_heads = args.params.num_kv_heads;
  const int count = plan_header(args).num_decode_items * num_heads;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    const ItemView view(args, plan_item(args, i / num_heads), i % num_heads);
    const int num_item_rows = view.row_end() - view.item.row_begin;
    if (num_item_rows <= 0 || num_item_rows > kDecodeRows) continue;
    KeySpan span(args, view, view.item.row_begin, view.row_end());
    span.clip(view.item);
    write_unseen<T, kHeadSize>(args, view, view.item.row_begin, span);
    const int tile_end = span.tile_end();
    int tile = span.tile_begin();
    if (tile >= tile_end) continue;
    WarpItem<T, Kv, kHeadSize, kPlain> warp(args, view, view.item.row_begin,
                                            shared + 2 * Layout::kBytes);
    KeyFinder finder(args, view, span);

    uint32_t row[2];  // of the tile that is asked for
    int entry[2];     // of the tile after that
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = tile * kTileTokens + h * kHalfTile + lane;
      row[h] = finder.key_row(finder.table_entry(position), position);
      Layout::template copy<kHalfTile>(keys, h * kHalfTile, cache, row[h]);
      device::commit_copies();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Layout::template copy<kHalfTile>(values, h * kHalfTile, cache, finder.value_row(row[h]));
      device::commit_copies();
      entry[h] = finder.table_entry((tile + 1) * kTileTokens + h * kHalfTile + lane);
    }
    for (; tile < tile_end; ++tile) {
      const int start = tile * kTileTokens;
      const bool has_next = tile + 1 < tile_end;
      const bool is_masked = warp.is_masked(start);
      const auto use_keys = [&](auto half) {
        constexpr int kHalf = decltype(half)::value;
        device::wait_copies<3>();
        __syncwarp();
        warp.rows.template score<kHalf>(keys);
        __syncwarp();
        if (has_next) {
          const int position = start + kTileTokens + kHalf * kHalfTile + lane;
          row[kHalf] = finder.key_row(entry[kHalf], position);
          Layout::template copy<kHalfTile>(keys, kHalf * kHalfTile, cache, row[kHalf]);
        }
        device::commit_copies();
      };
      const auto use_values = [&](auto half) {
        constexpr int kHalf = decltype(half)::value;
        device::wait_copies<3>();
        __syncwarp();
        warp.rows.template add_values<kHalf>(values, start, is_masked);
        __syncwarp();
        if (has_next) {
          Layout::template copy<kHalfTile>(values, kHalf * kHalfTile, cache,
                                           finder.value_row(row[kHalf]));
          entry[kHalf] = finder.table_entry(start + 2 * kTileTokens + kHalf * kHalfTile + lane);
        }
        device::commit_copies();
      };
      use_keys(Half<0>{});
      use_keys(Half<1>{});
      warp.rows.softmax(start, is_masked);
      use_values(Half<0>{});
      use_values(Half<1>{});
      if (!has_next || (tile + 1) % kRangeTiles == 0) {
        warp.finish_range(tile / kRangeTiles, !has_next,
                          __any_sync(kWholeWarp, finder.found_none) != 0);
      }
    }
  }
}

// ---- prefill

// What fits into the shared memory.
template <int kHeadSize>
constexpr int kPrefillWarps = kHeadSize <= 128 ? 8 : 4;

template <typename T, typename Kv, int kHeadSize>
constexpr int prefill_shared_bytes(int ring_slots) {
  return ring_slots * TileLayout<Kv, kHeadSize>::kBytes +
         kPrefillWarps<kHeadSize> * WarpRows<T, Kv, kHeadSize, true>::kSharedBytes +
         static_cast<int>(sizeof(int));
}

template <typename T, typename Kv, int kHeadSize, bool kPlain>
__global__ void __launch_bounds__(32 * kPrefillWarps<kHeadSize>)
    prefill_kernel(const __grid_constant__ KernelArgs args) {
  using Layout = TileLayout<Kv, kHeadSize>;
  constexpr int kWarps = kPrefillWarps<kHeadSize>;
  constexpr int kWarpKeys = kTileTokens / kWarps;  // keys that a warp copies of a tile
  VL_DYNAMIC_SHARED(unsigned char, shared);
  const auto* const cache = static_cast<const unsigned char*>(args.params.kv_cache);
  const int slots = args.ring_slots;
  const int warp_index = static_cast<int>(threadIdx.x) / 32;
  unsigned char* const warp_shared = shared + slots * Layout::kBytes +
                                     warp_index * WarpRows<T, Kv, kHeadSize, kPlain>::kSharedBytes;
  // Whether a key of the pass has no place in the cache.
  int* const found_none = reinterpret_cast<int*>(
      shared + slots * Layout::kBytes + kWarps * WarpRows<T, Kv, kHeadSize, kPlain>::kSharedBytes);
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
      KeySpan block_span(args, view, pass, min(pass + kWarps * kDecodeRows, view.row_end()));
      block_span.clip(view.item);
      const int first_row = pass + warp_index * kDecodeRows;
      write_unseen<T, kHeadSize>(args, view, first_row, block_span);
      WarpItem<T, Kv, kHeadSize, kPlain> warp(args, view, first_row, warp_shared);
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
          Layout::template copy<kWarpKeys>(shared + (step & (slots - 1)) * Layout::kBytes,
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

// ---- launches

template <typename T, typename Kv, int kHeadSize, bool kPlain>
void launch_decode(const KernelArgs& args) {
  constexpr int kShared = decode_shared_bytes<T, Kv, kHeadSize>();
  static const int blocks = persistent_blocks(decode_kernel<T, Kv, kHeadSize, kPlain>, 32, kShared);
  VL_LAUNCH((decode_kernel<T, Kv, kHeadSize, kPlain>), blocks, 32, kShared, args.params.stream,
            args);
}

template <typename T, typename Kv, int kHeadSize, bool kPlain>
void launch_prefill(KernelArgs args) {
  constexpr int kThreads = 32 * kPrefillWarps<kHeadSize>;
  static const int slots =
      prefill_shared_bytes<T, Kv, kHeadSize>(4) <= device::max_dynamic_shared_bytes() ? 4 : 2;
  const int shared_bytes = prefill_shared_bytes<T, Kv, kHeadSize>(slots);
  VL_CHECK(shared_bytes <= device::max_dynamic_shared_bytes(),
           "paged_attention: head size " + std::to_string(kHeadSize) + " needs " +
               std::to_string(shared_bytes) +
               " bytes of shared memory per block; this device has " +
               std::to_string(device::max_dynamic_shared_bytes()));
  static const int blocks =
      persistent_blocks(prefill_kernel<T, Kv, kHeadSize, kPlain>, kThreads, shared_bytes);
  args.ring_slots = slots;
  VL_LAUNCH((prefill_kernel<T, Kv, kHeadSize, kPlain>), blocks, kThreads, shared_bytes,
            args.params.stream, args);
}

// Kernels without soft cap and ALiBi are worth their compile time where most models are.
template <typename T, typename Kv, int kHeadSize>
constexpr bool kHasPlain = std::is_same_v<T, Kv> && (kHeadSize == 64 || kHeadSize == 128);

template <typename T, typename Kv, int kHeadSize>
void launch_items(const KernelArgs& args) {
  const bool plain =
      args.params.soft_cap == 0 && args.params.alibi_slopes == nullptr && args.factors.scale > 0;
  const auto launch = [&](auto is_plain) {
    constexpr bool kPlain = decltype(is_plain)::value;
    if (has_prefill_items(args.params.num_tokens, args.params.num_seqs)) {
      launch_prefill<T, Kv, kHeadSize, kPlain>(args);
    }
    launch_decode<T, Kv, kHeadSize, kPlain>(args);
  };
  if (kHasPlain<T, Kv, kHeadSize> && plain) {
    launch(std::bool_constant<kHasPlain<T, Kv, kHeadSize>>{});
  } else {
    launch(std::false_type{});
  }
}

}  // namespace attention
}  // namespace vllm_lite
