#include "attention/attention_items.h"

#include <algorithm>
#include <tuple>

namespace vllm_lite {
namespace {

// A range costs its reading and converting, about as much as the arithmetic of this many rows.
constexpr int64_t kRangeLoadRows = 8;
// Items are split by range until none is more than this part of the call.
constexpr int64_t kMinItems = 32;
// Items begin with whole register blocks of so many rows.
constexpr int32_t kBlockRows = 6;
constexpr int32_t kMergeRows = 24;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t cost(const AttentionItem& item) {
  return int64_t{item.ranges.end - item.ranges.begin} *
         (kRangeLoadRows + item.row_end - item.row_begin);
}

}  // namespace

int64_t AttentionItems::work() const { return total_cost_ * kRangeTokens * 2 * params_->head_size; }

void AttentionItems::plan(const PagedAttentionParams& params) {
  params_ = &params;
  find_sequences();
  add_rows();
  cuts_.clear();
  if (!sequences_.empty()) cut(0, sequences_.size(), 0);
  add_items();
  add_merges();
}

const int32_t* AttentionItems::table_of(const Sequence& sequence) const {
  return params_->block_tables + params_->rows[sequence.sequence] * params_->block_table_stride;
}

int64_t AttentionItems::whole_blocks(int32_t whole_ranges) const {
  return ceil_div(int64_t{whole_ranges} * kRangeTokens, params_->block_size);
}

int32_t AttentionItems::common_ranges(const Sequence& a, const Sequence& b) const {
  const int32_t most = std::min(a.whole_ranges, b.whole_ranges);
  const int32_t* ids = table_of(a);
  const int64_t blocks = whole_blocks(most);
  const int64_t common = std::mismatch(ids, ids + blocks, table_of(b)).first - ids;
  if (common == blocks) return most;
  return static_cast<int32_t>(common * params_->block_size / kRangeTokens);
}

void AttentionItems::find_sequences() {
  sequences_.clear();
  for (int32_t i = 0; i < params_->num_seqs; ++i) {
    const int32_t num_query = params_->query_start[i + 1] - params_->query_start[i];
    if (num_query <= 0) continue;
    Sequence sequence{};
    sequence.sequence = i;
    // The first row sees the least. With a window none of the ranges is whole for long.
    const int32_t seen = params_->seq_lens[i] - num_query + 1;
    if (params_->sliding_window == 0) sequence.whole_ranges = std::max(0, seen) / kRangeTokens;
    sequences_.push_back(sequence);
  }
  // In the order of their blocks, those with the same beginning are neighbours.
  std::sort(sequences_.begin(), sequences_.end(), [&](const Sequence& a, const Sequence& b) {
    const int32_t *a_ids = table_of(a), *b_ids = table_of(b);
    const int64_t a_blocks = whole_blocks(a.whole_ranges), b_blocks = whole_blocks(b.whole_ranges);
    const int64_t least = std::min(a_blocks, b_blocks);
    const auto [a_end, b_end] = std::mismatch(a_ids, a_ids + least, b_ids);
    if (a_end != a_ids + least) return *a_end < *b_end;
    return std::tie(a_blocks, a.sequence) < std::tie(b_blocks, b.sequence);
  });
  for (size_t i = 1; i < sequences_.size(); ++i) {
    sequences_[i].common_ranges = common_ranges(sequences_[i - 1], sequences_[i]);
  }
}

void AttentionItems::add_rows() {
  rows_.clear();
  const int32_t group = params_->num_heads / params_->num_kv_heads;
  for (Sequence& sequence : sequences_) {
    const int32_t first = params_->query_start[sequence.sequence];
    const int32_t last = params_->query_start[sequence.sequence + 1];
    sequence.row_begin = static_cast<int32_t>(rows_.size());
    for (int32_t token = first; token < last; ++token) {
      AttentionRow row{};
      row.token = token;
      row.position = params_->seq_lens[sequence.sequence] - (last - token);
      row.ranges = seen_ranges(row.position, row.position, params_->sliding_window);
      row.record = -1;
      for (row.head = 0; row.head < group; ++row.head) rows_.push_back(row);
    }
    sequence.row_end = static_cast<int32_t>(rows_.size());
  }
}

// The sequences [begin, end), which have all ranges before first_range in common, from that one on.
void AttentionItems::cut(size_t begin, size_t end, int32_t first_range) {
  const Sequence& first = sequences_[begin];
  if (end - begin == 1) {
    const RangeSpan rest{first_range, INT32_MAX};
    return cut_rows(first, first.row_end, rest, first_range > 0);
  }
  int32_t common = INT32_MAX;
  for (size_t i = begin + 1; i < end; ++i) common = std::min(common, sequences_[i].common_ranges);
  if (common > first_range) {
    cut_rows(first, sequences_[end - 1].row_end, {first_range, common}, true);
  }
  while (begin < end) {
    size_t next = begin + 1;
    while (next < end && sequences_[next].common_ranges > common) ++next;
    cut(begin, next, common);
    begin = next;
  }
}

// The rows from the first of `sequence` to row_end, in so far as they see the ranges.
void AttentionItems::cut_rows(const Sequence& sequence, int32_t row_end, RangeSpan ranges,
                              bool is_part) {
  const int64_t num_rows = row_end - sequence.row_begin;
  const int64_t num_items = ceil_div(num_rows, kMaxItemRows);
  // Even parts, of whole register blocks.
  const int64_t item_rows = ceil_div(ceil_div(num_rows, num_items), kBlockRows) * kBlockRows;
  Cut part{};
  part.is_part = is_part;
  part.item.table = params_->rows[sequence.sequence];
  for (int64_t begin = sequence.row_begin; begin < row_end; begin += item_rows) {
    part.item.row_begin = static_cast<int32_t>(begin);
    part.item.row_end = static_cast<int32_t>(std::min<int64_t>(row_end, begin + item_rows));
    RangeSpan seen = rows_[begin].ranges;
    for (int32_t i = part.item.row_begin; i < part.item.row_end; ++i) {
      seen.begin = std::min(seen.begin, rows_[i].ranges.begin);
      seen.end = std::max(seen.end, rows_[i].ranges.end);
    }
    part.item.ranges = {std::max(seen.begin, ranges.begin), std::min(seen.end, ranges.end)};
    // A row that sees nothing has an item all the same, which writes zeros.
    if (is_part && part.item.ranges.begin >= part.item.ranges.end) continue;
    cuts_.push_back(part);
  }
}

// For every KV head; larger items in parts of some ranges. Rows with more than one get records.
void AttentionItems::add_items() {
  items_.clear();
  num_records_ = 0;
  total_cost_ = 0;
  for (const Cut& part : cuts_) total_cost_ += cost(part.item) * params_->num_kv_heads;
  const int64_t most = total_cost_ / kMinItems;
  for (const auto& [whole, is_part] : cuts_) {
    const int64_t range_cost = kRangeLoadRows + whole.row_end - whole.row_begin;
    const int64_t num_ranges = whole.ranges.end - whole.ranges.begin;
    const auto step =
        static_cast<int32_t>(std::max<int64_t>(1, std::min(most / range_cost, num_ranges)));
    AttentionItem item = whole;
    do {
      item.ranges.end = std::min(item.ranges.begin + step, whole.ranges.end);
      for (item.kv_head = 0; item.kv_head < params_->num_kv_heads; ++item.kv_head) {
        items_.push_back(item);
      }
      item.ranges.begin = item.ranges.end;
    } while (item.ranges.begin < whole.ranges.end);
    if (!is_part && num_ranges <= step) continue;
    for (int32_t i = whole.row_begin; i < whole.row_end; ++i) {
      if (rows_[i].record >= 0) continue;
      rows_[i].record = num_records_;
      num_records_ += int64_t{rows_[i].ranges.end - rows_[i].ranges.begin} * params_->num_kv_heads;
    }
  }
  std::sort(items_.begin(), items_.end(), [](const AttentionItem& a, const AttentionItem& b) {
    return std::tuple(-cost(a), a.row_begin, a.ranges.begin, a.kv_head) <
           std::tuple(-cost(b), b.row_begin, b.ranges.begin, b.kv_head);
  });
}

void AttentionItems::add_merges() {
  merges_.clear();
  const int32_t num_rows = static_cast<int32_t>(rows_.size());
  AttentionItem item{};
  for (int32_t row = 0; row < num_rows; row = item.row_end) {
    item.row_begin = row;
    const int32_t most = std::min(num_rows, row + kMergeRows);
    while (row < most && rows_[row].record >= 0) ++row;
    item.row_end = row;
    if (item.row_begin == item.row_end) {
      ++item.row_end;
      continue;
    }
    for (item.kv_head = 0; item.kv_head < params_->num_kv_heads; ++item.kv_head) {
      merges_.push_back(item);
    }
  }
}

}  // namespace vllm_lite
