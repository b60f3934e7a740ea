// An item of the plan as the kernels see it: its rows in the tensors, and its keys in the cache.
#pragma once

#include <algorithm>

#include "attention/attention_tile.cuh"
#include "attention/params.h"

namespace vllm_lite {
namespace attention {

constexpr int kNoWindow = 1 << 30;  // longer than any sequence

struct KernelArgs {
  PagedAttentionParams params;
  ScoreFactors factors;
  float value_factor;  // of the sums
  int window;          // keys that a row sees at most; kNoWindow
  int group;
  int block_shift;  // log2 of block_size
  // Of the prefill kernel: 2 or 4, and whether the warps' totals are in local memory.
  int ring_slots;
  bool local_totals;
};

__device__ __forceinline__ PlanHeader plan_header(const KernelArgs& args) {
  const int4 words = __ldg(reinterpret_cast<const int4*>(args.params.plan));
  return {words.x, words.y, words.z, {}};
}
__device__ __forceinline__ PlanItem plan_item(const KernelArgs& args, int index) {
  const int4* words =
      reinterpret_cast<const int4*>(args.params.plan + kPlanHeaderWords + index * kPlanItemWords);
  const int4 a = __ldg(words), b = __ldg(words + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, {}};
}

// An item's place in the tensors. What the tensors say is not trusted to lead into the others.
struct ItemView {
  PlanItem item;
  int kv_head;
  int first_token;             // of the sequence, in query
  int first_position;          // of that token
  int num_rows;                // of the sequence; 0: nothing to do
  const int32_t* block_table;  // nullptr: no such row

  __device__ __forceinline__ ItemView(const KernelArgs& args, const PlanItem& plan_item, int head)
      : item(plan_item),
        kv_head(head),
        first_token(0),
        first_position(0),
        num_rows(0),
        block_table(nullptr) {
    const PagedAttentionParams& params = args.params;
    const int64_t partial_rows =
        static_cast<int64_t>(item.range_end - item.range_begin) * (item.row_end - item.row_begin);
    if (item.sequence < 0 || item.sequence >= params.num_seqs) return;
    if (item.partial >= 0 && item.partial + partial_rows > kMaxPartialRows) return;
    first_token = __ldg(params.query_start + item.sequence);
    const int num_query = __ldg(params.query_start + item.sequence + 1) - first_token;
    if (first_token < 0 || num_query < 0 || first_token > params.num_tokens - num_query) return;
    num_rows = num_query * args.group;
    first_position = __ldg(params.seq_lens + item.sequence) - num_query;
    const int row = __ldg(params.rows + item.sequence);
    if (row >= 0 && row < params.max_rows) {
      block_table = params.block_tables + row * params.block_table_stride;
    }
  }

  __device__ __forceinline__ int row_end() const { return min(item.row_end, num_rows); }
  __device__ __forceinline__ int position(const KernelArgs& args, int row) const {
    return first_position + row / args.group;
  }
  __device__ __forceinline__ int64_t element(const KernelArgs& args, int row,
                                             int64_t token_stride) const {
    return (first_token + row / args.group) * token_stride +
           static_cast<int64_t>(kv_head * args.group + row % args.group) * args.params.head_size;
  }

  // The workspace is the sums [num_kv_heads, kMaxPartialRows, head_size], then (maximum, weight)
  // [num_kv_heads, kMaxPartialRows].
  __device__ __forceinline__ int64_t partial_row(int range, int row) const {
    return static_cast<int64_t>(kv_head) * kMaxPartialRows + item.partial +
           static_cast<int64_t>(range - item.range_begin) * (item.row_end - item.row_begin) + row -
           item.row_begin;
  }
  static __device__ __forceinline__ float* partial_sums(const KernelArgs& args, int64_t partial) {
    return args.params.workspace + partial * args.params.head_size;
  }
  static __device__ __forceinline__ float2* partial_state(const KernelArgs& args, int64_t partial) {
    const int64_t rows = static_cast<int64_t>(args.params.num_kv_heads) * kMaxPartialRows;
    return reinterpret_cast<float2*>(partial_sums(args, rows)) + partial;
  }
};

// Keys, and the tiles they lie in. kPlain: as of the kernels; there is no sliding window.
struct KeySpan {
  int begin, end;

  // That some of rows row_begin .. row_end - 1 sees.
  template <bool kPlain>
  static __device__ __forceinline__ KeySpan seen_by_some(const KernelArgs& args,
                                                         const ItemView& view, int row_begin,
                                                         int row_end) {
    if (row_begin >= row_end) return {0, 0};
    const int end = max(0, view.position(args, row_end - 1) + 1);
    return {min(window_begin<kPlain>(args, view.position(args, row_begin)), end), end};
  }
  // That all of them see; nothing if there are no rows.
  template <bool kPlain>
  static __device__ __forceinline__ KeySpan seen_by_all(const KernelArgs& args,
                                                        const ItemView& view, int row_begin,
                                                        int row_end) {
    if (row_begin >= row_end) return {0, 0};
    return {window_begin<kPlain>(args, view.position(args, row_end - 1)),
            view.position(args, row_begin) + 1};
  }
  template <bool kPlain>
  static __device__ __forceinline__ int window_begin(const KernelArgs& args, int position) {
    if constexpr (kPlain) return 0;
    return max(0, position + 1 - args.window);
  }
  // The part that lies in the item's ranges.
  __device__ __forceinline__ void clip(const PlanItem& item) {
    begin = max(begin, item.range_begin * kRangeTokens);
    end = max(begin, min(end, item.range_end * kRangeTokens));
  }
  __device__ __forceinline__ int tile_begin() const { return begin / kTileTokens; }
  __device__ __forceinline__ int tile_end() const {
    return begin < end ? (end + kTileTokens - 1) / kTileTokens : tile_begin();
  }
  __device__ __forceinline__ bool meets(int tile) const {
    return begin < end && tile * kTileTokens < end && (tile + 1) * kTileTokens > begin;
  }
  // Whether all keys of the tile that starts there are in the span.
  __device__ __forceinline__ bool covers(int start) const {
    return start >= begin && start + kTileTokens <= end;
  }
};

// From positions to rows of the cache, seen as [num_blocks * 2 * num_kv_heads * block_size,
// head_size]; a value's row is value_rows after its key's. In two steps, so that the table entry
// can be on its way while other things are done.
struct KeyFinder {
  const PagedAttentionParams& params;
  const int32_t* block_table;
  KeySpan span;
  int block_shift;
  uint32_t head_row;
  uint32_t value_rows;
  bool found_none;  // a key of the span has no place in the cache

  __device__ __forceinline__ KeyFinder(const KernelArgs& args, const ItemView& view,
                                       const KeySpan& keys)
      : params(args.params),
        block_table(view.block_table),
        span(keys),
        block_shift(args.block_shift),
        head_row(static_cast<uint32_t>(view.kv_head) * args.params.block_size),
        value_rows(static_cast<uint32_t>(args.params.num_kv_heads) * args.params.block_size),
        found_none(false) {}

  __device__ __forceinline__ int table_entry(int position) const {
    if (position < span.begin || position >= span.end || block_table == nullptr) return -1;
    const int index = position >> block_shift;
    return index < params.block_table_stride ? __ldg(block_table + index) : -1;
  }
  __device__ __forceinline__ uint32_t key_row(int entry, int position) {
    if (position < span.begin || position >= span.end) return kNoRow;
    if (entry < 0 || entry >= params.num_blocks) {
      found_none = true;
      return kNoRow;
    }
    // A mask would take a register more.
    const int offset = position - (position >> block_shift) * params.block_size;
    return static_cast<uint32_t>(entry) * (2 * value_rows) + head_row + offset;
  }
  __device__ __forceinline__ uint32_t value_row(uint32_t key) const {
    return key == kNoRow ? kNoRow : key + value_rows;
  }
};

// Blocks of a kernel that run at once on the device.
template <typename Kernel>
int persistent_blocks(Kernel kernel, int threads, int shared_bytes) {
  device::allow_dynamic_shared(kernel, shared_bytes);
  return device::num_multiprocessors() *
         std::max(1, device::blocks_per_multiprocessor(kernel, threads, shared_bytes));
}

// Launches the decode and prefill items of the plan, not the merges. Instantiated once per head
// size and kind of cache, in attention_head_<size>[_fp8].cu.
template <typename T, typename Kv, int kHeadSize>
void launch_items(const KernelArgs& args);

}  // namespace attention
}  // namespace vllm_lite
