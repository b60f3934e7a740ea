#include "attention/attention_items.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

namespace vllm_lite {
namespace {

constexpr int32_t kBlockSize = 16, kBlocksEach = 256;
constexpr int32_t kBlocksOfRange = kRangeTokens / kBlockSize;

// Sequences that all have blocks of their own, until they are told to share some.
struct Step {
  std::vector<int32_t> query_start{0};
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> rows;
  std::vector<int32_t> block_tables;
  PagedAttentionParams params{};

  Step() {
    params.num_heads = 6;
    params.num_kv_heads = 2;
    params.head_size = 64;
    params.block_size = kBlockSize;
    params.block_table_stride = kBlocksEach;
  }
  void add(int32_t num_query, int32_t length) {
    query_start.push_back(query_start.back() + num_query);
    seq_lens.push_back(length);
    rows.push_back(static_cast<int32_t>(rows.size()));
    for (int32_t i = 0; i < kBlocksEach; ++i) {
      block_tables.push_back(static_cast<int32_t>(block_tables.size()));
    }
  }
  void share(int32_t from, int32_t to, int32_t num_blocks) {
    std::copy_n(block_tables.begin() + from * kBlocksEach, num_blocks,
                block_tables.begin() + to * kBlocksEach);
  }
  const PagedAttentionParams& finished() {
    params.num_seqs = static_cast<int32_t>(rows.size());
    params.query_start = query_start.data();
    params.seq_lens = seq_lens.data();
    params.rows = rows.data();
    params.block_tables = block_tables.data();
    return params;
  }
};

int64_t ranges_read(const AttentionItems& plan) {
  int64_t sum = 0;
  for (const AttentionItem& item : plan.items()) sum += item.ranges.end - item.ranges.begin;
  return sum;
}

// Every range that a row sees is in one item of it, from the blocks of its own sequence; a row
// with several items has a record for each range that no other row and KV head has, and one merge.
void check(Step& step) {
  const PagedAttentionParams& params = step.finished();
  AttentionItems plan;
  plan.plan(params);
  const auto& rows = plan.rows();
  std::map<std::tuple<int32_t, int32_t, int32_t>, int> seen;  // (row, KV head, range)
  std::map<int32_t, int> items_of_row, merges_of_row;
  int64_t cost = INT64_MAX;
  for (const AttentionItem& item : plan.items()) {
    ASSERT_LT(item.row_begin, item.row_end);
    ASSERT_LE(item.row_end - item.row_begin, kMaxItemRows);
    const int64_t item_cost =
        int64_t{item.ranges.end - item.ranges.begin} * (8 + item.row_end - item.row_begin);
    EXPECT_LE(item_cost, cost) << "a larger item after a smaller one";
    cost = item_cost;
    for (int32_t r = item.row_begin; r < item.row_end; ++r) {
      const AttentionRow& row = rows[r];
      EXPECT_EQ(row.record < 0, rows[item.row_begin].record < 0);
      if (item.kv_head == 0) ++items_of_row[r];
      int32_t sequence = 0;
      while (params.query_start[sequence + 1] <= row.token) ++sequence;
      const int32_t* own = params.block_tables + params.rows[sequence] * kBlocksEach;
      const int32_t* read = params.block_tables + item.table * kBlocksEach;
      for (int32_t range = item.ranges.begin; range < item.ranges.end; ++range) {
        if (range < row.ranges.begin || range >= row.ranges.end) continue;
        ++seen[{r, item.kv_head, range}];
        for (int32_t b = range * kBlocksOfRange; b < (range + 1) * kBlocksOfRange; ++b) {
          EXPECT_TRUE(b * kBlockSize > row.position || own[b] == read[b]);
        }
      }
    }
  }
  for (const AttentionItem& merge : plan.merges()) {
    for (int32_t r = merge.row_begin; r < merge.row_end; ++r) {
      if (merge.kv_head == 0) ++merges_of_row[r];
    }
  }
  std::map<int64_t, int> records;
  int64_t expected = 0;
  for (int32_t r = 0; r < static_cast<int32_t>(rows.size()); ++r) {
    const int64_t num_parts =
        int64_t{rows[r].ranges.end - rows[r].ranges.begin} * params.num_kv_heads;
    expected += num_parts;
    EXPECT_EQ(merges_of_row[r], rows[r].record >= 0);
    if (rows[r].record < 0) {
      EXPECT_EQ(items_of_row[r], 1);
    } else {
      for (int64_t i = 0; i < num_parts; ++i) EXPECT_EQ(++records[rows[r].record + i], 1);
    }
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), expected);
  for (const auto& [key, count] : seen) EXPECT_EQ(count, 1);
  EXPECT_TRUE(records.empty() || records.rbegin()->first < plan.num_records());
}

TEST(AttentionItems, RangesThatSequencesShareAreReadOnceForAllOfThem) {
  Step step;
  for (int32_t i = 0; i < 20; ++i) {
    step.add(1, 1024 + 100);
    if (i > 0) step.share(0, i, 1024 / kBlockSize);
  }
  AttentionItems plan;
  plan.plan(step.finished());
  // 20 * 3 rows fit into one item: 4 ranges of all, and one of each sequence.
  EXPECT_EQ(ranges_read(plan), (4 + 20) * step.params.num_kv_heads);
  check(step);
}

TEST(AttentionItems, ARangeIsSharedOnlyIfItIsWholeAndAlikeForAllRows) {
  Step step;
  step.add(1, 600);
  step.add(1, 600);
  step.share(0, 1, 31);  // a block short of two ranges
  step.add(300, 600);    // begins at 300: the second range is not whole for all rows
  step.share(0, 2, 31);
  AttentionItems plan;
  plan.plan(step.finished());
  // The first range: 2 * 3 + 900 rows in 13 items. The rest of the decodes: 2 ranges each. That of
  // the chunk: 13 items, of which the last 5 have rows after position 511.
  EXPECT_EQ(ranges_read(plan), (13 + 2 * 2 + 13 + 5) * step.params.num_kv_heads);
  check(step);
}

TEST(AttentionItems, SharedBlocksInAWindowAreReadBySequence) {
  Step step;
  step.params.sliding_window = 300;
  step.add(1, 1024);
  step.add(1, 1024);
  step.share(0, 1, 64);
  AttentionItems plan;
  plan.plan(step.finished());
  EXPECT_EQ(ranges_read(plan), 2 * 2 * step.params.num_kv_heads);
  check(step);
}

TEST(AttentionItems, RandomStepsAreCutWithoutGapOrOverlap) {
  std::mt19937 random(1);
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
  for (int round = 0; round < 300; ++round) {
    Step step;
    step.params.sliding_window = below(4) == 0 ? 1 + below(700) : 0;
    const int32_t num_sequences = 1 + below(12);
    for (int32_t i = 0; i < num_sequences; ++i) {
      const int32_t num_query = below(3) == 0 ? below(200) : below(8) != 0;
      step.add(num_query, num_query + below(2000));
      if (i > 0 && below(3) != 0) step.share(below(i), i, below(128));
    }
    check(step);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

}  // namespace
}  // namespace vllm_lite
