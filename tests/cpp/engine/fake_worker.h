// A worker in place of the real one. It knows plans' words alone, keeps in each KV slot the token
// and position that were stored there, and "computes" the next token from what it reads back
// through the block tables: a wrong block, row, copy or position changes the output. What does not
// fit together makes a row fail, which only a plan on top of a failed step may see.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "output_reader.h"
#include "scheduler/plan_view.h"
#include "scheduler/scheduler.h"

namespace vllm_lite::testing {

constexpr TokenId kNumTokens = 24;  // the vocabulary that the model samples from

// A prompt may say what is sampled: prompt token i >= kScript makes output token i be
// prompt[i] - kScript; kScriptFails makes that row fail.
constexpr TokenId kScript = 1000;
constexpr TokenId kScriptFails = kScript - 1;

// What the model makes of a sequence: the next token, and logprobs.
struct Sampled {
  TokenId token = kNoToken;
  Logprobs logprobs;  // with as many top entries as the sequence asks for
};

// `visible` are the sequence's tokens from `first` on, all that the attention window lets it see.
inline Sampled sample_next(std::span<const TokenId> visible, int32_t first,
                           const SamplingParams& params) {
  const RowSampling& row = params.row;
  uint64_t hash = uint64_t{row.seed_high} << 32 | row.seed_low;
  const auto mix = [&hash](uint64_t value) {
    hash = (hash ^ value) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 33;
  };
  mix(static_cast<uint64_t>(first));
  for (const TokenId token : visible) mix(static_cast<uint64_t>(token) + 1);

  const auto num_tokens = first + static_cast<int32_t>(visible.size());
  const int32_t script_at = num_tokens - row.num_prompt_tokens - first;
  Sampled sampled;
  if (script_at >= 0 && script_at < row.num_prompt_tokens - first &&
      visible[static_cast<size_t>(script_at)] >= kScriptFails) {
    const TokenId scripted = visible[static_cast<size_t>(script_at)] - kScript;
    if (scripted < 0) return sampled;
    sampled.token = scripted;
  } else {
    const bool masks = num_tokens < row.min_total_tokens;
    do {
      mix(1);
      sampled.token = static_cast<TokenId>(hash % kNumTokens);
    } while (masks && std::count(params.stop_ids.begin(), params.stop_ids.end(), sampled.token));
  }
  sampled.logprobs.logprob = -static_cast<float>(hash % 1000) / 64;
  sampled.logprobs.rank = 1 + static_cast<int32_t>(hash % 7);
  for (int32_t i = 0; i < row.num_logprobs; ++i) {
    sampled.logprobs.top_ids.push_back(
        static_cast<TokenId>((hash + static_cast<uint64_t>(i)) % 50));
    sampled.logprobs.top_logprobs.push_back(-static_cast<float>(hash % 16 + 2 * i) / 8);
  }
  return sampled;
}

// What it makes of a prompt's token after `visible`, and of a hidden state.
inline uint64_t hash_of(std::span<const TokenId> visible, int32_t first) {
  uint64_t hash = static_cast<uint64_t>(first) + 1;
  for (const TokenId token : visible) {
    hash = (hash ^ (static_cast<uint64_t>(token) + 1)) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 33;
  }
  return hash;
}
inline Logprobs score_token(std::span<const TokenId> visible, int32_t first, TokenId token,
                            int32_t count) {
  const uint64_t hash = hash_of(visible, first) ^ static_cast<uint64_t>(token);
  Logprobs logprobs{.logprob = -static_cast<float>(hash % 1000) / 64,
                    .rank = 1 + static_cast<int32_t>(hash % 7),
                    .top_ids = {},
                    .top_logprobs = {}};
  for (int32_t i = 0; i < count; ++i) {
    logprobs.top_ids.push_back(static_cast<TokenId>((hash + static_cast<uint64_t>(i)) % 50));
    logprobs.top_logprobs.push_back(-static_cast<float>(hash % 16 + 2 * i) / 8);
  }
  return logprobs;
}
inline float hidden_state(std::span<const TokenId> visible, int32_t first) {
  return static_cast<float>(hash_of(visible, first) % 97);
}

inline int32_t first_visible(int32_t position, int32_t window) {
  return window == 0 ? 0 : std::max(0, position - window + 1);
}

// A StepResult's words.
inline std::vector<int32_t> make_result(uint64_t step, const std::vector<Sampled>& rows,
                                        int32_t max_logprobs, const std::string& error = "",
                                        const std::vector<Logprobs>& scored = {},
                                        int32_t max_prompt_logprobs = 0,
                                        const std::vector<float>& vectors = {}) {
  ResultHeader header{};
  header.magic = kResultMagic;
  header.step_low = static_cast<uint32_t>(step);
  header.step_high = static_cast<uint32_t>(step >> 32);
  header.num_logits = static_cast<int32_t>(rows.size());
  header.max_logprobs = max_logprobs;
  header.error = error.empty() ? 0 : 1;
  header.message_bytes = static_cast<int32_t>(error.size());
  header.num_scored = static_cast<int32_t>(scored.size());
  header.max_prompt_logprobs = max_prompt_logprobs;
  header.num_vectors = static_cast<int32_t>(vectors.size());
  header.vector_size = 1;
  std::vector<int32_t> words(sizeof(header) / sizeof(int32_t));
  for (const Sampled& row : rows) words.push_back(row.token);
  if (max_logprobs >= 0) {
    for (const Sampled& row : rows) words.push_back(std::bit_cast<int32_t>(row.logprobs.logprob));
    for (const Sampled& row : rows) words.push_back(row.logprobs.rank);
    for (const Sampled& row : rows) {
      for (size_t i = 0; i < static_cast<size_t>(max_logprobs); ++i) {
        const auto& ids = row.logprobs.top_ids;
        words.push_back(i < ids.size() ? ids[i] : kNoToken);
      }
    }
    for (const Sampled& row : rows) {
      for (size_t i = 0; i < static_cast<size_t>(max_logprobs); ++i) {
        const auto& values = row.logprobs.top_logprobs;
        words.push_back(std::bit_cast<int32_t>(i < values.size() ? values[i] : 0.0f));
      }
    }
  }
  const auto push_float = [&words](float value) { words.push_back(std::bit_cast<int32_t>(value)); };
  for (const Logprobs& token : scored) push_float(token.logprob);
  for (const Logprobs& token : scored) words.push_back(token.rank);
  for (const Logprobs& token : scored) {
    for (size_t i = 0; i < static_cast<size_t>(max_prompt_logprobs); ++i) {
      words.push_back(i < token.top_ids.size() ? token.top_ids[i] : kNoToken);
    }
  }
  for (const Logprobs& token : scored) {
    for (size_t i = 0; i < static_cast<size_t>(max_prompt_logprobs); ++i) {
      push_float(i < token.top_logprobs.size() ? token.top_logprobs[i] : 0.0f);
    }
  }
  for (const float value : vectors) push_float(value);
  const size_t message_at = words.size();
  words.resize(message_at + (error.size() + 3) / 4);
  if (!error.empty()) std::memcpy(words.data() + message_at, error.data(), error.size());
  header.num_words = static_cast<int32_t>(words.size());
  std::memcpy(words.data(), &header, sizeof(header));
  return words;
}

class FakeWorker {
 public:
  explicit FakeWorker(const KvCacheConfig& config)
      : block_size_(config.block_size),
        window_(config.sliding_window),
        slots_(static_cast<size_t>(config.num_blocks) * static_cast<size_t>(config.block_size)) {}

  // Asked before each step; a message makes it fail, before or after the plan was taken in.
  std::function<std::string(const PlanView&)> fails;
  int64_t num_copies = 0;
  int64_t num_placeholders = 0;

  std::vector<int32_t> execute(std::span<const int32_t> words) {
    const PlanView plan(words);
    if (const std::string error = fails ? fails(plan) : ""; !error.empty()) {
      if (plan.step() % 2 == 0) take_in(plan);
      // A forward pass that failed may have stored anything.
      for (int32_t i = 0; i < plan.header().num_tokens; ++i) slot(plan.slot(i)) = {-7, -7};
      return make_result(plan.step(), {}, -1, error);
    }
    take_in(plan);
    num_copies += plan.header().num_block_copies;
    std::set<BlockId> copied;
    for (size_t i = 0; i < plan.copies().size(); i += 2) {
      EXPECT_TRUE(copied.insert(plan.copies()[i + 1]).second) << "two copies to one block";
    }
    for (size_t i = 0; i < plan.copies().size(); i += 2) {
      EXPECT_FALSE(copied.contains(plan.copies()[i])) << "a copy's source is a destination";
      for (int32_t offset = 0; offset < block_size_; ++offset) {
        slot(int64_t{plan.copies()[i + 1]} * block_size_ + offset) =
            slot(int64_t{plan.copies()[i]} * block_size_ + offset);
      }
    }
    std::set<int64_t> written;
    for (int32_t i = 0; i < plan.header().num_tokens; ++i) {
      EXPECT_TRUE(written.insert(plan.slot(i)).second) << "slot written twice";
      const auto at = static_cast<size_t>(i);
      const TokenId token = plan.token_ids()[at];
      num_placeholders += token < 0;
      slot(plan.slot(i)) = {token < 0 ? last_sampled_[-1 - token] : token, plan.positions()[at]};
    }
    return make_result(plan.step(), sample(plan), plan.header().max_logprobs, "", score(plan),
                       plan.header().max_prompt_logprobs, pool(plan));
  }

 private:
  struct Slot {
    TokenId token = -1;
    int32_t position = -1;
  };
  struct Row {
    SamplingParams sampling;
    std::vector<BlockId> table;
    bool fits = true;
  };

  Slot& slot(int64_t index) { return slots_.at(static_cast<size_t>(index)); }

  void take_in(const PlanView& plan) {
    for (const RowId row : plan.freed_rows()) rows_.erase(row);
    for (const NewRow& row : plan.new_rows()) {
      const bool was_freed = !rows_.contains(row.row);
      rows_[row.row] = {.sampling = row.sampling, .table = {}, .fits = was_freed};
    }
    for (int32_t i = 0; i < plan.header().num_table_updates; ++i) {
      const TableUpdate update = plan.table_update(i);
      std::vector<BlockId>& table = rows_[update.row].table;
      const auto index = static_cast<size_t>(update.index);
      if (index >= table.size()) table.resize(index + 1, -1);
      table[index] = update.block;
    }
  }

  // What a token of the step sees.
  struct Seen {
    RowId row;
    int32_t first;
    std::vector<TokenId> visible;
    bool fits;
  };
  Seen look(const PlanView& plan, int32_t index) {
    size_t sequence = 0;
    while (plan.query_start()[sequence + 1] <= index) ++sequence;
    const Row& row = rows_[plan.rows()[sequence]];
    const int32_t last = plan.positions()[static_cast<size_t>(index)];
    Seen seen{plan.rows()[sequence], first_visible(last, window_), {}, row.fits};
    for (int32_t p = seen.first; p <= last; ++p) {
      const auto entry = static_cast<size_t>(p / block_size_);
      const BlockId block = entry < row.table.size() ? row.table[entry] : kNoBlock;
      const Slot kv =
          block == kNoBlock ? Slot() : slot(int64_t{block} * block_size_ + p % block_size_);
      seen.fits &= kv.position == p;
      seen.visible.push_back(kv.token);
    }
    return seen;
  }

  std::vector<Sampled> sample(const PlanView& plan) {
    std::vector<Sampled> sampled;
    for (const int32_t index : plan.logits_indices()) {
      const Seen seen = look(plan, index);
      const SamplingParams& params = rows_[seen.row].sampling;
      sampled.push_back(seen.fits ? sample_next(seen.visible, seen.first, params) : Sampled());
      last_sampled_[seen.row] = std::max(sampled.back().token, 0);
    }
    return sampled;
  }

  std::vector<Logprobs> score(const PlanView& plan) {
    std::vector<Logprobs> scored;
    for (const ScoredToken& token : plan.scored()) {
      const Seen seen = look(plan, token.index);
      scored.push_back(seen.fits ? score_token(seen.visible, seen.first, token.token, token.count)
                                 : Logprobs());
    }
    return scored;
  }

  // Of a mean the sum, so that nothing is rounded.
  std::vector<float> pool(const PlanView& plan) {
    std::vector<float> vectors;
    for (const PooledPart& part : plan.pooled()) {
      const auto sequence = static_cast<size_t>(part.sequence);
      const int32_t end = plan.query_start()[sequence + 1];
      int32_t begin = plan.query_start()[sequence];
      float& sum = sums_[plan.rows()[sequence]];
      if (part.pooling == Pooling::kLast) begin = end - 1;
      if (part.pooling == Pooling::kLast || plan.positions()[static_cast<size_t>(begin)] == 0) {
        sum = 0;
      }
      for (int32_t index = begin; index < end; ++index) {
        const Seen seen = look(plan, index);
        sum += hidden_state(seen.visible, seen.first);
      }
      if (part.ends) vectors.push_back(sum);
    }
    return vectors;
  }

  const int32_t block_size_;
  const int32_t window_;
  std::vector<Slot> slots_;
  std::map<RowId, Row> rows_;
  std::map<RowId, TokenId> last_sampled_;
  std::map<RowId, float> sums_;
};

}  // namespace vllm_lite::testing
