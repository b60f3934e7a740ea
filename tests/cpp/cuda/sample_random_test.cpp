// Random rows with every kind of parameter: a choice is allowed, and the same alone and in a batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../core/numbers.h"
#include "ops/ops.h"
#include "ops/sample_workspace.h"

namespace vllm_lite {
namespace {

constexpr int32_t kLogprobs = 4;
constexpr int32_t kListWords = 300;

using Ids = std::vector<int32_t>;

Ids random_ids(Random& random, int32_t count, int32_t least, int32_t most) {
  Ids ids;
  for (int32_t i = 0; i < count; ++i) ids.push_back(random.integer(least, most));
  return ids;
}

bool is_in(const Ids& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

struct Rows {
  int32_t num_rows, vocab_size;
  std::vector<float> logits;
  std::vector<int32_t> rows, positions, counts;
  std::vector<RowState> states;
  std::vector<uint8_t> mask;
  std::vector<Ids> allowed, stop;
  std::vector<int32_t> id_lists;  // kListWords of each row
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
      RowState& state = states.emplace_back();
      RowSampling& sampling = state.sampling;
      sampling.temperature = row % 3 == 0 ? 0.0f : 0.7f;
      sampling.top_p = row % 2 == 0 ? 1.0f : 0.8f;
      sampling.min_p = row % 4 == 1 ? 0.05f : 0.0f;
      sampling.top_k = row % 4 < 2 ? random.integer(1, 60) : 0;
      const bool has_penalties = row % 2 == 1;
      sampling.repetition_penalty = has_penalties ? 1.3f : 1.0f;
      sampling.presence_penalty = has_penalties ? 0.2f : 0.0f;
      sampling.frequency_penalty = has_penalties ? 0.1f : 0.0f;
      sampling.num_logprobs = row % 3 - 1 < 0 ? -1 : kLogprobs;
      sampling.min_total_tokens = row % 2 == 0 ? 1001 : 0;
      sampling.seed_low = static_cast<uint32_t>(random.integer(0, 1 << 30));
      // Some ids are outside the vocabulary; token 0 is never masked.
      const bool has_lists = vocab_size > 1;
      const Ids bias = random_ids(random, has_lists && row % 5 == 2 ? 30 : 0, -1, vocab_size);
      allowed.push_back(random_ids(random, has_lists && row % 5 == 3 ? 300 : 0, 0, vocab_size + 9));
      stop.push_back(random_ids(random, has_lists && row % 5 == 4 ? 300 : 0, 1, vocab_size + 9));
      state.num_bias = static_cast<int32_t>(bias.size());
      state.num_allowed = static_cast<int32_t>(allowed.back().size());
      state.num_stop = static_cast<int32_t>(stop.back().size());
      Ids words = bias;
      for (size_t i = 0; i < bias.size(); ++i) {
        words.push_back(std::bit_cast<int32_t>(4 * random.normal()));
      }
      words.insert(words.end(), allowed.back().begin(), allowed.back().end());
      words.insert(words.end(), stop.back().begin(), stop.back().end());
      words.resize(kListWords, -7);
      id_lists.insert(id_lists.end(), words.begin(), words.end());
    }
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
    params.row_state = states.data();
    params.id_lists = id_lists.data();
    params.id_lists_stride = kListWords;
    params.output_counts = counted.data();
    params.prompt_mask = mask.data();
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
      EXPECT_TRUE(allowed[row].empty() || is_in(allowed[row], token));
      EXPECT_FALSE(positions[row] < states[row].sampling.min_total_tokens &&
                   is_in(stop[row], token));
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
      if (together.states[row].sampling.num_logprobs < 0) continue;
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
