// How the CPU cuts attention into pieces of work, and what runs one piece. Internal to attention/.
//
// A work item is (sequence, KV head, some rows); rows and ranges are those of attention_plan.h. The
// KV is read once for all rows of an item, and the ranges of a long sequence may run on different
// cores.
#pragma once

#include <cstdint>

#include "attention/attention_plan.h"
#include "attention/params.h"
#include "core/isa.h"

namespace vllm_lite {

constexpr int32_t kMaxItemRows = 72;
constexpr int32_t kMaxHeadSize = 256;

struct AttentionItem {
  int32_t sequence;
  int32_t kv_head;
  int32_t row_begin;  // rows, at most kMaxItemRows of them
  int32_t row_end;
  int32_t range_begin;  // KV ranges that some row sees a part of
  int32_t range_end;
  int64_t partial;  // where the results of the item's ranges begin in `partials`; -1: writes `out`
                    // itself
};

// Results of one range before the merge: sums [rows, head_size], maxima [rows], weights [rows].
static inline int64_t partial_floats(int32_t num_rows, int32_t head_size) {
  return static_cast<int64_t>(num_rows) * (head_size + 2);
}

// Floats of scratch one item needs: query, a range's and the total sums, K and V tile, scores, and
// a maximum and a weight per row for the range and the total.
static inline int64_t attention_scratch_floats(int32_t head_size) {
  return (3 * kMaxItemRows + 2 * kTileTokens) * static_cast<int64_t>(head_size) +
         kMaxItemRows * (kTileTokens + 4);
}

struct AttentionCall {
  const PagedAttentionParams* params;
  const AttentionItem* item;
  float* partials;
  float* scratch;  // 64-byte aligned
};

// The item's ranges; the result goes to `out`, or each range's to `partials`.
VL_DECLARE_ISA_KERNEL(attend_item, AttentionCall)
// Merges the item's partials into `out`.
VL_DECLARE_ISA_KERNEL(merge_item, AttentionCall)

}  // namespace vllm_lite
