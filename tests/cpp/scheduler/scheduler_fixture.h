// A scheduler over a small pool, with helpers that read like the story of a test.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "core/check.h"
#include "scheduler/scheduler.h"

namespace vllm_lite {

class SchedulerTest : public testing::Test {
 protected:
  SchedulerTest() {
    cache_config_ = {.num_blocks = 16, .block_size = 4, .enable_prefix_caching = false};
    config_.max_num_seqs = 4;
    config_.max_num_batched_tokens = 64;
    config_.max_model_len = 64;
  }

  Scheduler& scheduler() {
    if (scheduler_ == nullptr) {
      cache_ = std::make_unique<KvCacheManager>(cache_config_);
      scheduler_ = std::make_unique<Scheduler>(config_, *cache_);
    }
    return *scheduler_;
  }

  // Prompts begin with the sequence's own number unless a first token is given, so that none share
  // a prefix.
  Sequence* make(int32_t prompt, int32_t output, TokenId first = -1) {
    Sequence& s = *sequences_.emplace_back(std::make_unique<Sequence>());
    s.tokens.resize(static_cast<size_t>(prompt));
    std::iota(s.tokens.begin(), s.tokens.end(), 0);
    if (prompt > 0) {
      s.tokens[0] = first >= 0 ? first : 1000 + static_cast<TokenId>(sequences_.size());
    }
    s.num_prompt_tokens = prompt;
    s.max_total_tokens = prompt + output;
    s.sampling = &sampling_;
    return &s;
  }
  Sequence* add(int32_t prompt, int32_t output) {
    Sequence* s = make(prompt, output);
    EXPECT_EQ(scheduler().add(s), AddResult::kAdded);
    return s;
  }
  Sequence* add_fork(Sequence* parent) {
    Sequence* s = make(parent->num_prompt_tokens, 1);
    s->tokens.assign(parent->tokens.begin(), parent->tokens.begin() + parent->num_prompt_tokens);
    s->max_total_tokens = parent->max_total_tokens;
    s->fork_parent = parent;
    EXPECT_EQ(scheduler().add(s), AddResult::kAdded);
    return s;
  }

  const Step& plan() {
    const Step& step = scheduler().plan();
    scheduler().check_invariants();
    return step;
  }
  // Commits `token` for every logit, and finishes the sequences that are complete.
  void commit(const Step& step, TokenId token = 7) {
    const std::vector<TokenId> sampled(static_cast<size_t>(step.num_logits()), token);
    scheduler().commit(sampled);
    for (const ScheduledSequence& part : step.sequences) {
      Sequence& s = *part.sequence;
      if (s.state == SequenceState::kRunning && s.num_tokens() == s.max_total_tokens) {
        scheduler().finish(&s);
      }
    }
    scheduler().check_invariants();
  }
  const Step& step() {
    const Step& result = plan();
    if (!result.empty()) commit(result);
    return result;
  }
  void run_until_idle(int32_t max_steps = 1000) {
    for (int32_t i = 0; scheduler().has_work(); ++i) {
      ASSERT_LT(i, max_steps);
      ASSERT_FALSE(step().empty());
    }
    EXPECT_EQ(cache_->num_used_blocks(), 0);
  }
  // Tokens of the sequence in the step; 0: it is not in it.
  static int32_t tokens_of(const Step& step, const Sequence* sequence) {
    for (const ScheduledSequence& part : step.sequences) {
      if (part.sequence == sequence) return part.num_tokens;
    }
    return 0;
  }
  static std::vector<RowId> freed(const Step& step) {
    return {step.freed_rows.begin(), step.freed_rows.end()};
  }
  template <typename Function>
  static std::string error_of(Function function) {
    try {
      function();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  KvCacheConfig cache_config_;
  SchedulerConfig config_;
  SamplingParams sampling_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::unique_ptr<KvCacheManager> cache_;
  std::unique_ptr<Scheduler> scheduler_;
};

}  // namespace vllm_lite
