#include "attention/attention_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "core/check.h"

namespace vllm_lite {
namespace {

struct Step {
  std::vector<int32_t> query_start{0};
  std::vector<int32_t> seq_lens;
  int32_t num_heads = 8;
  int32_t num_kv_heads = 2;
  int32_t sliding_window = 0;
  int32_t num_multiprocessors = 132;

  void add(int32_t num_query, int32_t length) {
    query_start.push_back(query_start.back() + num_query);
    seq_lens.push_back(length);
  }
  int32_t group() const { return num_heads / num_kv_heads; }
  int32_t num_query(int32_t sequence) const {
    return query_start[sequence + 1] - query_start[sequence];
  }
  PlanInput input() const {
    return {query_start.data(), seq_lens.data(), static_cast<int32_t>(seq_lens.size()),
            num_heads,          num_kv_heads,    sliding_window,
            num_multiprocessors};
  }
};

struct Plan {
  std::vector<PlanItem> decode, prefill, merges;
};

Plan make_plan(const Step& step) {
  const int64_t capacity =
      attention_plan_size(step.query_start.back(), static_cast<int64_t>(step.seq_lens.size()),
                          step.num_heads, step.num_kv_heads, step.num_multiprocessors);
  std::vector<int32_t> words(static_cast<size_t>(capacity));
  const int64_t used = plan_attention(step.input(), words.data(), capacity);
  PlanHeader header;
  std::memcpy(&header, words.data(), sizeof(header));
  Plan plan;
  const int32_t* next = words.data() + kPlanHeaderWords;
  const auto take = [&](int32_t count, std::vector<PlanItem>& items) {
    items.resize(static_cast<size_t>(count));
    if (count > 0) std::memcpy(items.data(), next, items.size() * sizeof(PlanItem));
    next += count * kPlanItemWords;
  };
  take(header.num_decode_items, plan.decode);
  take(header.num_prefill_items, plan.prefill);
  take(header.num_merge_items, plan.merges);
  EXPECT_EQ(next - words.data(), used);
  return plan;
}

int32_t num_ranges(const PlanItem& item) { return item.range_end - item.range_begin; }
int32_t num_rows(const PlanItem& item) { return item.row_end - item.row_begin; }

// Every row meets every range it sees exactly once; what is split has one merge that reads exactly
// what the parts leave, and no two parts leave anything in one place.
void expect_complete(const Step& step, const Plan& plan) {
  std::vector<PlanItem> items = plan.decode;
  items.insert(items.end(), plan.prefill.begin(), plan.prefill.end());
  std::map<std::pair<int32_t, int32_t>, std::vector<PlanItem>> by_row;
  for (const PlanItem& item : items) {
    ASSERT_LT(item.row_begin, item.row_end);
    for (int32_t row = item.row_begin; row < item.row_end; ++row) {
      by_row[{item.sequence, row}].push_back(item);
    }
  }
  int64_t rows = 0;
  for (int32_t s = 0; s < static_cast<int32_t>(step.seq_lens.size()); ++s) {
    const int32_t first_position = step.seq_lens[s] - step.num_query(s);
    for (int32_t row = 0; row < step.num_query(s) * step.group(); ++row, ++rows) {
      std::vector<PlanItem>& parts = by_row[{s, row}];
      ASSERT_FALSE(parts.empty()) << "sequence " << s << " row " << row;
      std::sort(parts.begin(), parts.end(),
                [](const PlanItem& a, const PlanItem& b) { return a.range_begin < b.range_begin; });
      for (size_t i = 1; i < parts.size(); ++i) {
        ASSERT_EQ(parts[i - 1].range_end, parts[i].range_begin);
      }
      const int32_t position = first_position + row / step.group();
      if (position >= 0) {
        EXPECT_LE(parts.front().range_begin * int64_t{kRangeTokens},
                  first_seen(position, step.sliding_window));
        EXPECT_GT(parts.back().range_end * int64_t{kRangeTokens}, position);
      }
      for (const PlanItem& part : parts) {
        EXPECT_EQ(part.partial >= 0, parts.size() > 1);
      }
    }
  }
  EXPECT_EQ(static_cast<int64_t>(by_row.size()), rows);

  std::vector<bool> taken(kMaxPartialRows);
  for (const PlanItem& item : items) {
    if (item.partial < 0) continue;
    const int64_t end = item.partial + int64_t{num_ranges(item)} * num_rows(item);
    ASSERT_LE(end, kMaxPartialRows);
    for (int64_t i = item.partial; i < end; ++i) {
      EXPECT_FALSE(taken[static_cast<size_t>(i)]);
      taken[static_cast<size_t>(i)] = true;
    }
  }
  int64_t merged = 0;
  for (const PlanItem& merge : plan.merges) {
    merged += int64_t{num_ranges(merge)} * num_rows(merge);
    int32_t found = 0;
    for (const PlanItem& item : items) {
      if (item.sequence != merge.sequence || item.row_begin != merge.row_begin) continue;
      EXPECT_EQ(item.row_end, merge.row_end);
      EXPECT_EQ(item.partial,
                merge.partial + (item.range_begin - merge.range_begin) * num_rows(merge));
      found += num_ranges(item);
    }
    EXPECT_EQ(found, num_ranges(merge));
  }
  EXPECT_EQ(merged, std::count(taken.begin(), taken.end(), true));
}

bool longest_first(const std::vector<PlanItem>& items) {
  return std::is_sorted(items.begin(), items.end(), [](const PlanItem& a, const PlanItem& b) {
    return num_ranges(a) > num_ranges(b);
  });
}

TEST(AttentionPlan, RandomStepsAreCompleteAndFitTheirBounds) {
  std::mt19937 random(1);
  const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % n); };
  for (int i = 0; i < 300; ++i) {
    Step step;
    step.num_kv_heads = 1 + below(4);
    step.num_heads = step.num_kv_heads * (1 + below(16));
    step.sliding_window = below(3) == 0 ? 1 + below(2000) : 0;
    step.num_multiprocessors = 1 + below(200);
    const int32_t num_seqs = below(20), longest = 1 + below(i % 10 == 0 ? 200000 : 3000);
    for (int32_t s = 0; s < num_seqs; ++s) {
      const int32_t length = 1 + below(longest);
      const int32_t num_query = below(4) == 0 ? std::min(length, below(400)) : below(3);
      step.add(num_query, length);
    }
    const Plan plan = make_plan(step);
    expect_complete(step, plan);
    EXPECT_TRUE(longest_first(plan.decode) && longest_first(plan.prefill));
    for (const PlanItem& item : plan.decode) EXPECT_LE(num_rows(item), kDecodeRows);
    for (const PlanItem& item : plan.prefill) EXPECT_LE(num_rows(item), kPrefillRows);
    if (!has_prefill_items(step.query_start.back(), num_seqs)) {
      EXPECT_TRUE(plan.prefill.empty());
    }
  }
}

TEST(AttentionPlan, ALoneLongSequenceIsSpreadOverTheDevice) {
  Step step;
  step.num_kv_heads = 8;
  step.num_heads = 32;
  step.add(1, 32768);
  const Plan plan = make_plan(step);
  EXPECT_GE(plan.decode.size() * 8, 500u);
  EXPECT_EQ(plan.merges.size(), 1u);
}

TEST(AttentionPlan, ManyEqualSequencesAreNotSplit) {
  Step step;
  step.num_kv_heads = 8;
  step.num_heads = 32;
  for (int i = 0; i < 1024; ++i) step.add(1, 1024);
  const Plan plan = make_plan(step);
  EXPECT_EQ(plan.decode.size(), 1024u);
  EXPECT_TRUE(plan.merges.empty());
}

TEST(AttentionPlan, AStragglerAmongManyIsSplit) {
  Step step;
  for (int i = 0; i < 2000; ++i) step.add(1, 500);
  step.add(1, 100000);
  const Plan plan = make_plan(step);
  EXPECT_EQ(plan.merges.size(), 1u);
  EXPECT_LE(num_ranges(plan.decode.front()), 16);
}

TEST(AttentionPlan, AFewQueryTokensAreDecodedAndAPromptIsNot) {
  Step step;  // group 4
  step.add(8, 1000);
  step.add(9, 1000);
  step.add(0, 77);
  const Plan plan = make_plan(step);
  ASSERT_FALSE(plan.decode.empty() || plan.prefill.empty());
  for (const PlanItem& item : plan.decode) EXPECT_EQ(item.sequence, 0);
  for (const PlanItem& item : plan.prefill) EXPECT_EQ(item.sequence, 1);
}

TEST(AttentionPlan, AWindowLeavesOutWhatIsBeforeIt) {
  Step step;
  step.sliding_window = 300;
  step.add(1, 10000);
  const Plan plan = make_plan(step);
  ASSERT_FALSE(plan.decode.empty());
  EXPECT_TRUE(plan.prefill.empty());
  int32_t first = INT32_MAX;
  for (const PlanItem& item : plan.decode) first = std::min(first, item.range_begin);
  EXPECT_EQ(first, (10000 - 300) / kRangeTokens);
}

TEST(AttentionPlan, WrongInputIsRefused) {
  Step step;
  step.add(2, 10);
  int32_t word = 0;
  EXPECT_THROW(plan_attention(step.input(), &word, 1), Error);
  std::vector<int32_t> plan(1000);
  Step descending = step;
  descending.query_start = {2, 1};
  EXPECT_THROW(plan_attention(descending.input(), plan.data(), 1000), Error);
  Step heads = step;
  heads.num_kv_heads = 3;
  EXPECT_THROW(plan_attention(heads.input(), plan.data(), 1000), Error);
  Step none = step;
  none.num_multiprocessors = 0;
  EXPECT_THROW(plan_attention(none.input(), plan.data(), 1000), Error);
}

}  // namespace
}  // namespace vllm_lite
