// Random rows with every kind of parameter: a choice is allowed, and the same alone and in a batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "bfloat16.h"
#include "ops/ops.h"
#include "ops/sample_workspace.h"

namespace vllm_lite {
namespace {

constexpr int32_t kLogprobs = 4;

// Ids for each of the rows, back to back.
struct Lists {
  std::vector<int32_t> start{0}, ids;

  void add(Random& random, int32_t count, int32_t least, int32_t most) {
    for (int32_t i = 0; i < count; ++i) ids.push_back(random.integer(least, most));
    start.push_back(static_cast<int32_t>(ids.size()));
  }
};

struct Rows {
  int32_t num_rows, vocab_size;
  std::vector<float> logits, temperature, top_p, min_p, repetition, presence, frequency;
  std::vector<int32_t> rows, positions, top_k, num_logprobs, min_total_tokens, counts;
  std::vector<uint64_t> seeds;
  std::vector<uint8_t> mask;
  Lists bias, allowed, stop;
  std::vector<float> bias_values;
  std::vector<int32_t> token_ids, ranks, top_ids;
  std::vector<float> logprobs, top_logprobs;

  Rows(Random& random, int32_t count, int32_t num_ids) : num_rows(count), vocab_size(num_ids) {
    for (int32_t i = 0; i < num_rows * vocab_size; ++i) {
      // Every fifth rounded, so that there are ties.
      const float x = 3 * random.normal();
      logits.push_back(i % 5 == 0 ? std::round(x) : x);
      counts.push_back(random.integer(0, 50) == 0 ? random.integer(1, 3) : 0);
      mask.push_back(random.integer(0, 50) == 0);
    }
    for (int32_t row = 0; row < num_rows; ++row) {
      rows.push_back(row);
      positions.push_back(random.integer(1, 1000));
      temperature.push_back(row % 3 == 0 ? 0.0f : 0.7f);
      top_p.push_back(row % 2 == 0 ? 1.0f : 0.8f);
      min_p.push_back(row % 4 == 1 ? 0.05f : 0.0f);
      top_k.push_back(row % 4 < 2 ? random.integer(1, 60) : 0);
      const bool has_penalties = row % 2 == 1;
      repetition.push_back(has_penalties ? 1.3f : 1.0f);
      presence.push_back(has_penalties ? 0.2f : 0.0f);
      frequency.push_back(has_penalties ? 0.1f : 0.0f);
      num_logprobs.push_back(row % 3 - 1 < 0 ? -1 : kLogprobs);
      // Some ids are outside the vocabulary; token 0 is never masked.
      const bool has_lists = vocab_size > 1;
      bias.add(random, has_lists && row % 5 == 2 ? 30 : 0, -1, vocab_size);
      allowed.add(random, has_lists && row % 5 == 3 ? 300 : 0, 0, vocab_size + 9);
      stop.add(random, has_lists && row % 5 == 4 ? 300 : 0, 1, vocab_size + 9);
      min_total_tokens.push_back(row % 2 == 0 ? 1001 : 0);
      seeds.push_back(static_cast<uint64_t>(random.integer(0, 1 << 30)));
    }
    for (size_t i = 0; i < bias.ids.size(); ++i) bias_values.push_back(4 * random.normal());
    token_ids.assign(num_rows, -2);
    ranks.assign(num_rows, -2);
    logprobs.assign(num_rows, NAN);
    top_ids.assign(num_rows * kLogprobs, -2);
    top_logprobs.assign(num_rows * kLogprobs, NAN);
  }

  // Samples `count` rows from `first` on, as one call.
  void sample(int32_t first, int32_t count) {
    const int64_t bytes = SampleWorkspace(nullptr, count, vocab_size).num_bytes;
    std::vector<uint64_t> workspace(static_cast<size_t>(bytes + 7) / 8 + 1, ~0ull);
    std::vector<int32_t> counted(counts);
    SampleParams params{};
    params.logits = logits.data() + int64_t{first} * vocab_size;
    params.logits_stride = vocab_size;
    params.rows = rows.data() + first;
    params.positions = positions.data() + first;
    params.temperature = temperature.data();
    params.top_p = top_p.data();
    params.min_p = min_p.data();
    params.top_k = top_k.data();
    params.repetition_penalty = repetition.data();
    params.presence_penalty = presence.data();
    params.frequency_penalty = frequency.data();
    params.num_logprobs = num_logprobs.data();
    params.min_total_tokens = min_total_tokens.data();
    params.seeds = seeds.data();
    params.output_counts = counted.data();
    params.prompt_mask = mask.data();
    params.bias_start = bias.start.data() + first;
    params.bias_ids = bias.ids.data();
    params.bias_values = bias_values.data();
    params.allowed_start = allowed.start.data() + first;
    params.allowed_ids = allowed.ids.data();
    params.stop_start = stop.start.data() + first;
    params.stop_ids = stop.ids.data();
    params.token_ids = token_ids.data() + first;
    params.logprobs = logprobs.data() + first;
    params.ranks = ranks.data() + first;
    params.top_ids = top_ids.data() + int64_t{first} * kLogprobs;
    params.top_logprobs = top_logprobs.data() + int64_t{first} * kLogprobs;
    params.workspace = workspace.data();
    if (reinterpret_cast<uintptr_t>(params.workspace) % 16 != 0) {
      params.workspace = workspace.data() + 1;
    }
    params.workspace_bytes = bytes;
    params.num_rows = count;
    params.vocab_size = vocab_size;
    params.max_rows = num_rows;
    params.max_logprobs = kLogprobs;
    sample_cuda(params);
    for (int32_t row = first; row < first + count; ++row) {
      const int32_t token = token_ids[row];
      ASSERT_TRUE(token >= 0 && token < vocab_size) << "row " << row;
      const auto is_in = [&](const Lists& lists) {
        const auto begin = lists.ids.begin();
        const auto end = begin + lists.start[row + 1];
        return std::find(begin + lists.start[row], end, token) != end;
      };
      EXPECT_TRUE(allowed.start[row] == allowed.start[row + 1] || is_in(allowed));
      EXPECT_FALSE(positions[row] < min_total_tokens[row] && is_in(stop));
      const size_t at = static_cast<size_t>(row) * vocab_size + token;
      ASSERT_EQ(counted[at], counts[at] + 1) << "the token is counted";
    }
  }
};

TEST(SampleRandom, RowsAreTheSameAloneAndTogether) {
  // One segment of a row, and several.
  for (const int32_t vocab_size : {1, 1000, kSampleSegment + 77}) {
    SCOPED_TRACE(vocab_size);
    Random random(7);
    Rows together(random, vocab_size > 1000 ? 5 : 12, vocab_size);
    Rows alone = together;
    together.sample(0, together.num_rows);
    if (HasFatalFailure()) return;
    for (int32_t row = 0; row < alone.num_rows; ++row) alone.sample(row, 1);
    EXPECT_EQ(together.token_ids, alone.token_ids);
    EXPECT_EQ(together.logprobs, alone.logprobs);
    EXPECT_EQ(together.ranks, alone.ranks);
    for (int32_t row = 0; row < together.num_rows; ++row) {
      const float* logits = together.logits.data() + int64_t{row} * vocab_size;
      const float chosen = logits[together.token_ids[row]];
      const int64_t above =
          std::count_if(logits, logits + vocab_size, [&](float x) { return x > chosen; });
      if (together.num_logprobs[row] < 0) continue;
      EXPECT_EQ(together.ranks[row], 1 + above);
      const double total = std::accumulate(logits, logits + vocab_size, 0.0,
                                           [](double sum, float x) { return sum + std::exp(x); });
      EXPECT_NEAR(together.logprobs[row], chosen - std::log(total), 1e-4);
      const float best = *std::max_element(logits, logits + vocab_size);
      EXPECT_EQ(logits[together.top_ids[row * kLogprobs]], best);
    }
  }
}

}  // namespace
}  // namespace vllm_lite
