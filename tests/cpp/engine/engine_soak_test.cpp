// Seeded random soaks: any configuration, any mix of requests, aborts, failing rows and steps, slow
// clients; everything that is not cut short is what it is alone, and nothing is left at the end.
//
// VLLM_LITE_SOAK_SEEDS=<n> runs n seeds per vocabulary in place of the few of the default run;
// VLLM_LITE_SOAK_FIRST=<seed> begins there.
#include <cstdlib>
#include <random>
#include <set>

#include "engine_fixture.h"

namespace vllm_lite::testing {
namespace {

struct Coverage {
  int64_t preemptions = 0, prefix_hits = 0, copies = 0, failed_steps = 0;
  int64_t stopped = 0, length = 0, errors = 0, refused = 0, queue_full = 0, aborted = 0;
  int64_t scored = 0, pooled = 0;
  int64_t searches = 0, failed_searches = 0, aborted_searches = 0;
  int64_t right_drafts = 0, wrong_drafts = 0;
};

class Soak {
 public:
  Soak(uint32_t seed, const Vocabulary& vocabulary, bool is_async) : random_(seed) {
    config_.async_scheduling = is_async;
    config_.cache.block_size = 1 << pick(0, 3);
    config_.cache.num_blocks = pick(6, 40);
    config_.cache.enable_prefix_caching = chance(0.6);
    config_.cache.sliding_window = chance(0.2) ? pick(1, 12) : 0;
    SchedulerConfig& scheduler = config_.scheduler;
    scheduler.max_num_seqs = pick(1, 8);
    scheduler.max_num_batched_tokens = pick(1, 40);
    scheduler.max_model_len =
        pick(3, std::min(70, config_.cache.num_blocks * config_.cache.block_size));
    scheduler.max_num_waiting = pick(2, 24);
    scheduler.max_chunk_tokens = chance(0.5) ? pick(1, 8) : 0;
    scheduler.policy = chance(0.5) ? SchedulingPolicy::kPriority : SchedulingPolicy::kFirstCome;
    if (!is_async && chance(0.6)) {
      scheduler.num_speculative_tokens = pick(1, 5);
      scheduler.max_num_logits = chance(0.3) ? scheduler.max_num_seqs + pick(0, 6) : 0;
      config_.ngram.prompt_lookup_min = pick(1, 2);
      config_.ngram.prompt_lookup_max = pick(config_.ngram.prompt_lookup_min, 4);
    }
    config_.num_clients = pick(1, 3);
    failures_ = chance(0.3) ? 0.05 : 0;
    aborts_ = chance(0.5) ? 0.15 : 0;
    for (TokenId& token : common_) token = pick(0, kNumTokens - 1);
    engine_ = std::make_unique<Engine>(config_, vocabulary);
  }

  void run(int32_t num_steps, Coverage& coverage) {
    Engine& engine = *engine_;
    engine.worker.fails = [&](const PlanView& plan) -> std::string {
      if (!chance(failures_)) return "";
      ++coverage.failed_steps;
      return "step " + std::to_string(plan.step());
    };
    for (int32_t i = 0; i < num_steps && !::testing::Test::HasFailure(); ++i) {
      while (chance(0.4)) submit();
      if (chance(aborts_)) abort();
      step();
    }
    engine.run_until_idle();
    for (const RequestInput& input : inputs_) {
      if (input.beam_search.width > 0) {
        check_beams(input, coverage);
      } else {
        check(input, coverage);
      }
    }
    coverage.preemptions += engine.core.stats().num_preemptions;
    coverage.prefix_hits += engine.core.stats().prefix_hits;
    coverage.copies += engine.worker.num_copies;
    const EngineStats stats = engine.core.stats();
    coverage.right_drafts += stats.num_accepted_tokens;
    coverage.wrong_drafts += stats.num_draft_tokens - stats.num_accepted_tokens;
  }

 private:
  int32_t pick(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random_);
  }
  bool chance(double p) { return std::bernoulli_distribution(p)(random_); }

  // As Engine::step, but with anything in between.
  void step() {
    EngineCore& core = engine_->core;
    const bool planned = engine_->begin_step();
    while (chance(0.3)) submit();
    if (chance(aborts_)) abort();
    const bool waits = !planned || core.num_outstanding() == core.max_outstanding() || chance(0.1);
    if (core.num_outstanding() > 0 && waits) engine_->finish_step();
    if (chance(0.4)) engine_->take_outputs();
  }

  void abort() {
    if (inputs_.empty()) return;
    const auto back = std::min<int32_t>(pick(1, 12), static_cast<int32_t>(inputs_.size()));
    const RequestKey key = inputs_[inputs_.size() - static_cast<size_t>(back)].key;
    engine_->core.abort(key);
    aborted_.insert(key);
  }

  void submit() {
    RequestInput input;
    input.key =
        make_key(static_cast<uint16_t>(pick(0, config_.num_clients - 1)), inputs_.size() + 1);
    const int32_t max_model_len = config_.scheduler.max_model_len;
    const int32_t length = chance(0.03) ? pick(0, 1) * max_model_len : pick(1, max_model_len - 1);
    const int32_t num_common = chance(0.6) ? pick(0, length) : 0;
    for (int32_t i = 0; i < length; ++i) {
      input.prompt.push_back(i < num_common ? common_[static_cast<size_t>(i)]
                                            : pick(0, kNumTokens - 1));
    }
    if (chance(0.4)) {  // gives a few tokens again and again
      const auto period = static_cast<size_t>(pick(1, 4));
      for (size_t i = 0; i < input.prompt.size(); ++i) {
        input.prompt[i] =
            kScript + (i < period ? input.prompt[i] : input.prompt[i - period]) % kScript;
      }
    }
    if (length > 0 && chance(0.05))
      input.prompt[static_cast<size_t>(pick(0, length - 1))] = kScriptFails;
    input.num_samples = chance(0.3) ? pick(2, 5) : 1;
    input.priority = pick(-1, 1);
    input.max_tokens = chance(0.05) ? pick(-1, 0) : chance(0.1) ? 2147483647 : pick(1, 40);
    if (chance(0.3)) {
      input.num_prompt_logprobs = pick(0, 3);
      input.prompt_logprobs_start = chance(0.3) ? pick(0, length) : 0;
    }
    if (chance(0.15)) {
      input.pooling = chance(0.5) ? Pooling::kLast : Pooling::kMean;
      input.num_samples = 1;
      input.max_tokens = 0;
    }
    input.min_tokens = chance(0.3) ? pick(0, 12) : 0;
    input.salt = {chance(0.2) ? 1U : 0U, 0};
    RowSampling& row = input.sampling.row;
    row.seed_low = random_();
    row.num_logprobs = chance(0.3) ? pick(0, 5) : -1;
    if (chance(0.2)) row.presence_penalty = 0.5f;
    if (chance(0.6)) input.sampling.stop_ids = input.eos_ids = {kEos};
    if (chance(0.2)) input.sampling.stop_ids.push_back(pick(1, kNumTokens - 1));
    static const std::vector<std::string> stops = {"a",
                                                   "ab",
                                                   "abab",
                                                   "\n",
                                                   "\xC3\xA9",
                                                   "\xC3\xA9\n",
                                                   "stop",
                                                   "\xE2\x82\xAC"
                                                   "a",
                                                   kFffd,
                                                   kFffd + kFffd,
                                                   "b" + kFffd,
                                                   "User:",
                                                   "sts",
                                                   " "};
    while (chance(0.4)) input.stops.push_back(stops[static_cast<size_t>(pick(0, 13))]);
    input.include_stop_in_output = chance(0.3);
    input.skip_special_tokens = chance(0.7);
    if (chance(0.2)) make_beam_search(input);
    engine_->core.submit(input);
    inputs_.push_back(input);
  }

  void make_beam_search(RequestInput& input) {
    input.num_samples = 1;
    input.min_tokens = 0;
    input.stops.clear();
    input.num_prompt_logprobs = -1;
    input.pooling = Pooling::kNone;
    input.beam_search.width = pick(1, 5);
    input.beam_search.length_penalty = pick(-2, 2);
    input.beam_search.early_stopping = static_cast<EarlyStopping>(pick(0, 2));
    input.sampling.row.num_logprobs =
        input.beam_search.width + static_cast<int32_t>(input.sampling.stop_ids.size());
  }

  void check_beams(const RequestInput& input, Coverage& coverage) {
    const SchedulerConfig& scheduler = config_.scheduler;
    const auto num_prompt = static_cast<int32_t>(input.prompt.size());
    const int32_t width = input.beam_search.width;
    const int32_t total =
        std::min(input.max_tokens, scheduler.max_model_len - num_prompt) + num_prompt;
    const int32_t shared = num_prompt / config_.cache.block_size;
    const bool possible =
        num_prompt > 0 && num_prompt < scheduler.max_model_len && input.max_tokens > 0 &&
        width <= std::min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens) &&
        shared + width * (ceil_div(total, config_.cache.block_size) - shared) <=
            config_.cache.num_blocks;
    const Sample first = engine_->sample(input.key);
    if (first.finish_reason == "refused" || first.finish_reason == "queue_full") {
      EXPECT_TRUE(first.finish_reason == "queue_full" || !possible);
      EXPECT_FALSE(first.message.empty());
    } else if (!first.finished()) {
      EXPECT_TRUE(aborted_.contains(input.key)) << "no end";
      EXPECT_TRUE(first.tokens.empty());
      ++coverage.aborted_searches;
    } else if (first.message.starts_with("step ")) {
      EXPECT_TRUE(first.tokens.empty());
      ++coverage.failed_searches;
    } else {
      ASSERT_TRUE(possible);
      engine_->expect_solo_beams(input);
      ++coverage.searches;
    }
  }

  void check(const RequestInput& input, Coverage& coverage) {
    const auto num_prompt = static_cast<int32_t>(input.prompt.size());
    const bool possible = num_prompt > 0 && num_prompt < config_.scheduler.max_model_len &&
                          input.max_tokens >= 0 &&
                          input.num_samples <= config_.scheduler.max_num_waiting;
    for (int32_t i = 0; i < input.num_samples; ++i) {
      SCOPED_TRACE("request " + std::to_string(input.key) + " sample " + std::to_string(i));
      const Sample got = engine_->sample(input.key, i);
      if (got.finish_reason == "refused" || got.finish_reason == "queue_full") {
        EXPECT_TRUE(got.tokens.empty() && got.text.empty() && !got.message.empty());
        EXPECT_TRUE(got.finish_reason == "queue_full" || !possible);
        ++(got.finish_reason == "refused" ? coverage.refused : coverage.queue_full);
        continue;
      }
      if (!got.finished()) {
        EXPECT_TRUE(aborted_.contains(input.key)) << "no end";
        ++coverage.aborted;
        if (got.tokens.empty()) continue;
      }
      ASSERT_TRUE(possible);
      const Sample expected = engine_->solo(input, i);
      const bool cut = !got.finished() || got.message.starts_with("step ");
      if (!cut) {
        EXPECT_EQ(got.tokens, expected.tokens);
        EXPECT_EQ(got.finish_reason, expected.finish_reason);
        EXPECT_EQ(got.stop_token, expected.stop_token);
        EXPECT_EQ(got.stop_string, expected.stop_string);
        EXPECT_EQ(got.logprobs, expected.logprobs);
        EXPECT_EQ(got.vector, expected.vector);
        if (got.finish_reason != "error") {
          EXPECT_EQ(got.prompt_logprobs, expected.prompt_logprobs);
          coverage.scored += got.prompt_logprobs.size() > 0;
          coverage.pooled += got.vector.size() > 0;
        }
        ++(got.finish_reason == "stop"     ? coverage.stopped
           : got.finish_reason == "length" ? coverage.length
                                           : coverage.errors);
      }
      if (cut || got.finish_reason == "error") {
        EXPECT_LE(got.tokens.size(), expected.tokens.size());
        EXPECT_TRUE(std::equal(got.tokens.begin(), got.tokens.end(), expected.tokens.begin()));
        EXPECT_TRUE(expected.text.starts_with(got.text)) << got.text << "\n" << expected.text;
      } else {
        EXPECT_EQ(got.text, expected.text);
      }
    }
  }

  std::mt19937 random_;
  EngineCoreConfig config_;
  double failures_ = 0, aborts_ = 0;
  TokenId common_[70];
  std::unique_ptr<Engine> engine_;
  std::vector<RequestInput> inputs_;
  std::set<RequestKey> aborted_;
};

uint32_t environment(const char* name, uint32_t otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : static_cast<uint32_t>(std::strtoul(value, nullptr, 10));
}

void soak(const Vocabulary& vocabulary, bool is_async) {
  const uint32_t first = environment("VLLM_LITE_SOAK_FIRST", 1);
  const uint32_t count = environment("VLLM_LITE_SOAK_SEEDS", 60);
  Coverage coverage;
  for (uint32_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Soak(seed, vocabulary, is_async).run(100, coverage);
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
  if (count < 60) return;
  for (const int64_t times :
       {coverage.preemptions, coverage.prefix_hits, coverage.copies, coverage.failed_steps,
        coverage.stopped, coverage.length, coverage.errors, coverage.refused, coverage.queue_full,
        coverage.aborted, coverage.scored, coverage.pooled, coverage.searches,
        coverage.failed_searches, coverage.aborted_searches}) {
    EXPECT_GT(times, 20);
  }
  if (is_async) return;
  EXPECT_GT(coverage.right_drafts, 100);
  EXPECT_GT(coverage.wrong_drafts, 500);
}

// SCH-05
TEST(EngineSoak, ByteLevel) { soak(byte_level_vocabulary(), false); }
TEST(EngineSoak, ByteFallback) { soak(byte_fallback_vocabulary(), false); }
TEST(EngineSoak, Asynchronous) { soak(byte_level_vocabulary(), true); }
TEST(EngineSoak, AsynchronousByteFallback) { soak(byte_fallback_vocabulary(), true); }

}  // namespace
}  // namespace vllm_lite::testing
