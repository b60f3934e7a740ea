#include "attention/attention_plan.h"

#include <cstring>
#include <string>
#include <vector>

#include "core/check.h"

namespace vllm_lite {
namespace {

// Sequences of up to this many rows go to the decode kernel: reading their KV once per kDecodeRows
// out of L2 costs less than a prefill tile that is mostly empty.
constexpr int64_t kMaxDecodeRows = 32;
// Items that run at once on a multiprocessor.
constexpr int64_t kDecodeWarpsPerMultiprocessor = 5;
constexpr int64_t kPrefillBlocksPerMultiprocessor = 1;
// At most this many parts of split items per item that runs at once.
constexpr int64_t kMaxPartsPerSlot = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t num_ranges(const PlanItem& item) { return item.range_end - item.range_begin; }
int64_t num_rows(const PlanItem& item) { return item.row_end - item.row_begin; }

// One kernel's items, as cut by sequence and rows, and then by range.
struct ItemList {
  int64_t num_slots;     // items that run at once; every item is one per KV head
  int64_t partial_cost;  // of leaving a range in the workspace, in kTileCost
  std::vector<PlanItem> items;
};

// Costs in quarters of a tile's time.
constexpr int64_t kTileCost = 4;
constexpr int64_t kRangeCost = kTileCost * kRangeTokens / kTileTokens;
constexpr int64_t kItemCost = kTileCost;  // until its first tile is there

// Ranges per part that make the step shortest. In longest-first order no slot is busy for longer
// than the mean over the slots and one item more; shorter parts lower the second and raise the
// first.
int64_t choose_part_ranges(const ItemList& list, int64_t num_kv_heads) {
  int64_t longest = 0;
  for (const PlanItem& item : list.items) longest = std::max(longest, num_ranges(item));
  int64_t best = longest, best_cost = INT64_MAX;
  for (int64_t part = 1;; part *= 2) {
    part = std::min(part, longest);
    int64_t num_items = 0, num_parts = 0, num_partials = 0;
    for (const PlanItem& item : list.items) {
      const int64_t parts =
          std::max<int64_t>(1, ceil_div(num_ranges(item), std::max<int64_t>(1, part)));
      num_items += parts;
      if (parts == 1) continue;
      num_parts += parts;
      num_partials += num_ranges(item);
    }
    const int64_t overhead = num_items * kItemCost + num_partials * list.partial_cost;
    const int64_t cost = overhead * num_kv_heads / list.num_slots + part * kRangeCost;
    if (num_parts <= kMaxPartsPerSlot * list.num_slots && cost <= best_cost) {
      best = part;
      best_cost = cost;
    }
    if (part >= longest) return best;
  }
}

void sort_longest_first(std::vector<PlanItem>& items) {
  std::stable_sort(items.begin(), items.end(), [](const PlanItem& a, const PlanItem& b) {
    return num_ranges(a) > num_ranges(b);
  });
}

// Cuts the longer items by range while the workspace has room, and lists what is to be merged.
void split_by_range(ItemList& list, int64_t num_kv_heads, int64_t& partial_rows,
                    std::vector<PlanItem>& merges) {
  const int64_t part_ranges = choose_part_ranges(list, num_kv_heads);
  sort_longest_first(list.items);  // so that the longest find room
  std::vector<PlanItem> items;
  for (PlanItem& item : list.items) {
    const int64_t ranges = num_ranges(item), rows = num_rows(item);
    if (ranges <= part_ranges || partial_rows + ranges * rows > kMaxPartialRows) {
      items.push_back(item);
      continue;
    }
    item.partial = static_cast<int32_t>(partial_rows);
    partial_rows += ranges * rows;
    merges.push_back(item);
    const int64_t parts = ceil_div(ranges, part_ranges);
    for (int64_t i = 0; i < parts; ++i) {
      PlanItem part = item;
      part.range_begin = static_cast<int32_t>(item.range_begin + ranges * i / parts);
      part.range_end = static_cast<int32_t>(item.range_begin + ranges * (i + 1) / parts);
      part.partial += static_cast<int32_t>((part.range_begin - item.range_begin) * rows);
      items.push_back(part);
    }
  }
  list.items = std::move(items);
  sort_longest_first(list.items);
}

void cut_rows(const PlanInput& input, int32_t sequence, int64_t item_rows,
              std::vector<PlanItem>& items) {
  const int64_t num_query = input.query_start[sequence + 1] - input.query_start[sequence];
  const int64_t first_position = input.seq_lens[sequence] - num_query;
  const int64_t group = input.num_heads / input.num_kv_heads, rows = num_query * group;
  for (int64_t begin = 0; begin < rows; begin += item_rows) {
    const int64_t end = std::min(rows, begin + item_rows);
    const RangeSpan span = seen_ranges(first_position + begin / group,
                                       first_position + (end - 1) / group, input.sliding_window);
    PlanItem item{};
    item.sequence = sequence;
    item.row_begin = static_cast<int32_t>(begin);
    item.row_end = static_cast<int32_t>(end);
    item.range_begin = std::min(span.begin, span.end);
    item.range_end = span.end;
    item.partial = -1;
    items.push_back(item);
  }
}

void check_input(const PlanInput& input) {
  VL_CHECK(
      input.num_kv_heads > 0 && input.num_heads > 0 && input.num_heads % input.num_kv_heads == 0,
      "plan_attention: num_heads is " + std::to_string(input.num_heads) +
          "; it must be a positive multiple of num_kv_heads, " +
          std::to_string(input.num_kv_heads));
  VL_CHECK(input.num_multiprocessors > 0, "plan_attention: num_multiprocessors must be positive");
  VL_CHECK(input.sliding_window >= 0,
           "plan_attention: sliding_window must be positive, or 0 for none");
  int32_t previous = 0;
  for (int32_t i = 0; i <= input.num_seqs; ++i) {
    VL_CHECK(input.query_start[i] >= previous, "plan_attention: query_start[" + std::to_string(i) +
                                                   "] is " + std::to_string(input.query_start[i]) +
                                                   "; it must ascend from 0");
    previous = input.query_start[i];
  }
}

}  // namespace

int64_t plan_attention(const PlanInput& input, int32_t* plan, int64_t capacity) {
  check_input(input);
  const int64_t num_kv_heads = input.num_kv_heads, num_multiprocessors = input.num_multiprocessors;
  const int64_t group = input.num_heads / num_kv_heads;
  ItemList decode{num_multiprocessors * kDecodeWarpsPerMultiprocessor, 1, {}};
  ItemList prefill{num_multiprocessors * kPrefillBlocksPerMultiprocessor, kTileCost, {}};
  const bool with_prefill =
      has_prefill_items(input.query_start[input.num_seqs] - input.query_start[0], input.num_seqs);
  for (int32_t sequence = 0; sequence < input.num_seqs; ++sequence) {
    const int64_t rows = (input.query_start[sequence + 1] - input.query_start[sequence]) * group;
    if (with_prefill && rows > kMaxDecodeRows) {
      cut_rows(input, sequence, kPrefillRows, prefill.items);
    } else {
      cut_rows(input, sequence, kDecodeRows, decode.items);
    }
  }
  int64_t partial_rows = 0;
  std::vector<PlanItem> merges;
  split_by_range(decode, num_kv_heads, partial_rows, merges);
  split_by_range(prefill, num_kv_heads, partial_rows, merges);

  const std::vector<PlanItem>* lists[] = {&decode.items, &prefill.items, &merges};
  PlanHeader header{};
  header.num_decode_items = static_cast<int32_t>(decode.items.size());
  header.num_prefill_items = static_cast<int32_t>(prefill.items.size());
  header.num_merge_items = static_cast<int32_t>(merges.size());
  int64_t words = kPlanHeaderWords;
  for (const auto* list : lists) words += static_cast<int64_t>(list->size()) * kPlanItemWords;
  VL_CHECK(words <= capacity, "plan_attention: plan has " + std::to_string(capacity) +
                                  " elements; this one needs " + std::to_string(words) +
                                  " (attention_plan_size bounds it)");
  std::memcpy(plan, &header, sizeof(header));
  plan += kPlanHeaderWords;
  for (const auto* list : lists) {
    if (!list->empty()) std::memcpy(plan, list->data(), list->size() * sizeof(PlanItem));
    plan += static_cast<int64_t>(list->size()) * kPlanItemWords;
  }
  return words;
}

int64_t attention_plan_size(int64_t num_tokens, int64_t num_seqs, int32_t num_heads,
                            int32_t num_kv_heads, int32_t num_multiprocessors) {
  VL_CHECK(num_kv_heads > 0, "attention_plan_size: num_kv_heads must be positive");
  const int64_t whole = num_tokens * (num_heads / num_kv_heads) / kDecodeRows + num_seqs;
  const int64_t parts = kMaxPartsPerSlot * num_multiprocessors *
                        (kDecodeWarpsPerMultiprocessor + kPrefillBlocksPerMultiprocessor);
  return kPlanHeaderWords + kPlanItemWords * (2 * whole + parts);  // merges: one per whole item
}

}  // namespace vllm_lite
