// The work list of paged_attention_cuda: made on the host once per step, read by every layer.
//
// A row of a sequence and KV head is query token r / group, head r % group of the KV head's `group`
// query heads; an item is some rows of a sequence and some of the KV ranges they see, for every KV
// head. How the rows and ranges are cut decides how long a step takes, and never changes a bit of a
// result: see kRangeTokens.
#pragma once

#include <algorithm>
#include <cstdint>

namespace vllm_lite {

// The KV is cut at absolute positions into tiles, and those into ranges. A row goes through the
// tiles of a range in order (online softmax), every range starts afresh, and the ranges' results
// are merged in order. That fixes a row's arithmetic whatever item it is in.
constexpr int32_t kTileTokens = 64;
constexpr int32_t kRangeTokens = 256;

// First position that a query token at `position` sees; sliding_window 0: no window. Static, as
// *_isa.cpp use it.
static constexpr int64_t first_seen(int64_t position, int64_t sliding_window) {
  const int64_t begin = position + 1 - sliding_window;
  return sliding_window == 0 || begin < 0 ? 0 : begin;
}

// Ranges that one of the query tokens at first_position .. last_position sees.
struct RangeSpan {
  int32_t begin;
  int32_t end;
};
constexpr RangeSpan seen_ranges(int64_t first_position, int64_t last_position,
                                int64_t sliding_window) {
  const int64_t seen_end = std::max<int64_t>(0, last_position + 1);
  return {static_cast<int32_t>(first_seen(first_position, sliding_window) / kRangeTokens),
          static_cast<int32_t>((seen_end + kRangeTokens - 1) / kRangeTokens)};
}

// Rows of an item: one tensor core tile for a warp of the decode kernel; eight warps that share
// their KV in the prefill kernel.
constexpr int32_t kDecodeRows = 16;
constexpr int32_t kPrefillRows = 128;
// Rows, counted once per range, whose results may wait in the workspace to be merged.
constexpr int32_t kMaxPartialRows = 32768;

// A plan is int32 words: the header, then the decode, prefill and merge items.
struct PlanHeader {
  int32_t num_decode_items;
  int32_t num_prefill_items;
  int32_t num_merge_items;
  int32_t unused[5];
};
struct PlanItem {
  int32_t sequence;
  int32_t row_begin;
  int32_t row_end;
  int32_t range_begin;
  int32_t range_end;
  // -1: the item writes `out` itself. Else range r leaves the item's rows in the workspace, from
  // partial row partial + (r - range_begin) * (row_end - row_begin) on; a merge item reads them.
  int32_t partial;
  int32_t unused[2];
};
constexpr int64_t kPlanHeaderWords = sizeof(PlanHeader) / sizeof(int32_t);
constexpr int64_t kPlanItemWords = sizeof(PlanItem) / sizeof(int32_t);

struct PlanInput {
  const int32_t* query_start;  // [num_seqs + 1], cumulative query tokens
  const int32_t* seq_lens;     // [num_seqs]
  int32_t num_seqs;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t sliding_window;  // 0: none. A plan made without a window is right for any window, too.
  int32_t num_multiprocessors;
};

// A step of no more query tokens than sequences has decode items alone, however they are spread.
constexpr bool has_prefill_items(int64_t num_tokens, int64_t num_seqs) {
  return num_tokens > num_seqs;
}

// Writes the plan and returns its words. Throws Error if query_start does not ascend from 0 or more
// or the plan is longer than `capacity`.
int64_t plan_attention(const PlanInput& input, int32_t* plan, int64_t capacity);

// Words that every plan of at most so many tokens and sequences fits into.
int64_t attention_plan_size(int64_t num_tokens, int64_t num_seqs, int32_t num_heads,
                            int32_t num_kv_heads, int32_t num_multiprocessors);

// float32 elements of workspace that every plan fits into: per partial row and KV head, head_size
// sums, a maximum and a weight.
constexpr int64_t attention_workspace_size(int64_t num_kv_heads, int64_t head_size) {
  return kMaxPartialRows * num_kv_heads * (head_size + 2);
}

}  // namespace vllm_lite
