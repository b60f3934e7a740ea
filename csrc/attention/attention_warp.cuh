// An item's rows in the hands of a warp: where they stand, and what becomes of their results.
#pragma once

#include "attention/attention_item.cuh"

namespace vllm_lite {
namespace attention {

constexpr int kRangeTiles = kRangeTokens / kTileTokens;
template <int kIndex>
using Half = std::integral_constant<int, kIndex>;

// Where a warp's rows stand, and what becomes of their results.
template <typename T, typename Kv, int kHeadSize, bool kPlain,
          typename Layout = PaddedLayout<Kv, kHeadSize>>
struct WarpItem {
  using Rows = WarpRows<T, Kv, kHeadSize, kPlain, Layout>;

  const KernelArgs& args;
  const ItemView& view;
  int first_row;        // of the warp
  KeySpan span;         // of the warp
  KeySpan seen_by_all;  // of the rows that exist; if none does, nothing
  Rows rows;
  bool has_total;

  __device__ __forceinline__ WarpItem(const KernelArgs& kernel_args, const ItemView& item_view,
                                      int warp_row, unsigned char* shared,
                                      float4* local_total = nullptr)
      : args(kernel_args), view(item_view), first_row(warp_row), has_total(false) {
    const int row_end = min(warp_row + kDecodeRows, view.row_end());
    span = KeySpan::seen_by_some<kPlain>(args, view, warp_row, row_end);
    seen_by_all = KeySpan::seen_by_all<kPlain>(args, view, warp_row, row_end);
    span.clip(view.item);
    rows.begin(shared, local_total);
    rows.factors = args.factors;
    rows.window = args.window;
    const T* query[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane_row(h);
      const bool exists = row < view.row_end();
      query[h] = exists ? static_cast<const T*>(args.params.query) +
                              view.element(args, row, args.params.query_token_stride)
                        : nullptr;
      rows.position[h] = exists ? view.position(args, row) : -1;
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
  __device__ __forceinline__ bool is_masked(int start) const { return !seen_by_all.covers(start); }

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

}  // namespace attention
}  // namespace vllm_lite
