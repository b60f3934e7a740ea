// How the CPU cuts attention into pieces of work, and what runs one piece. Internal to attention/.
//
// A row is a query token and one of the query heads of a KV head; ranges are those of
// attention_plan.h. A work item is some rows, a KV head and some ranges that are the same blocks
// for all these rows: of one sequence, or of several whose block tables begin alike. The KV is read
// once for all rows of an item, and the ranges of a long sequence may run on different cores.
#pragma once

#include <cstdint>

#include "attention/attention_plan.h"
#include "attention/params.h"
#include "core/isa.h"

namespace vllm_lite {

constexpr int32_t kMaxItemRows = 72;
// Of an item's scratch: with AMX, up to 5 blocks of 16 rows.
constexpr int32_t kMaxScratchRows = 80;
constexpr int32_t kMaxHeadSize = 256;

struct AttentionRow {
  int32_t token;  // of query and out
  int32_t head;   // within the KV head's group
  int32_t position;
  RangeSpan ranges;  // that it sees a part of
  // A row of more than one item leaves the result of each range in a record, to be merged: that of
  // its first range for KV head 0 is number `record`, then the other KV heads', then the next
  // range's. -1: the row's only item writes `out` itself.
  int64_t record;
};

struct AttentionItem {
  int32_t table;  // row of block_tables
  int32_t kv_head;
  int32_t row_begin;  // at most kMaxItemRows rows
  int32_t row_end;
  RangeSpan ranges;  // that some row sees a part of
};

// A record is the softmax state of a row over some of the KV: head_size sums of weights * V, the
// largest score, the sum of weights, and padding to a multiple of 64 bytes. A weight is
// exp(score - largest); a row that has seen nothing has weight 0.
static inline int64_t record_floats(int32_t head_size) { return head_size + 16; }

// Floats of scratch one item needs: query, the records of a range and of all, K and V tile, scores.
static inline int64_t attention_scratch_floats(int32_t head_size) {
  return kMaxScratchRows * (head_size + 2 * record_floats(head_size) + kTileTokens) +
         2 * kTileTokens * int64_t{head_size};
}

struct AttentionCall {
  const PagedAttentionParams* params;
  const AttentionRow* rows;
  const AttentionItem* item;
  const AttentionItem* next_item;  // what this thread may run next, to be fetched; or nullptr
  float* records;
  float* scratch;  // 64-byte aligned
};

// The item's ranges; the results go to `out` or to the rows' records, for all rows alike.
VL_DECLARE_ISA_KERNEL(attend_item, AttentionCall)
// Merges the records of the item's rows into `out`; the item's ranges do not matter.
VL_DECLARE_ISA_KERNEL(merge_item, AttentionCall)
// For bfloat16 alone.
namespace avx512_bf16 {
void attend_item(const AttentionCall& call);
void merge_item(const AttentionCall& call);
}  // namespace avx512_bf16
// For bfloat16, in the cache too.
namespace amx {
void attend_item(const AttentionCall& call);
void merge_item(const AttentionCall& call);
}  // namespace amx

}  // namespace vllm_lite
