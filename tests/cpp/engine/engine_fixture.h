// An engine core with a fake worker and clients, stepped by the test.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "engine/engine_core.h"
#include "fake_worker.h"
#include "output_reader.h"
#include "solo_run.h"

namespace vllm_lite::testing {

constexpr RequestKey make_key(uint16_t client, uint64_t counter) {
  return RequestKey{client} << kClientShift | counter;
}

// A prompt that makes the model give exactly `output`, then what it likes. At least as long as
// that.
inline std::vector<TokenId> script(const std::vector<TokenId>& output) {
  std::vector<TokenId> prompt;
  for (const TokenId token : output) prompt.push_back(kScript + token);
  return prompt;
}

class Engine {
 public:
  explicit Engine(const EngineCoreConfig& config, Vocabulary vocabulary = byte_level_vocabulary())
      : config_(config),
        vocabulary_(std::move(vocabulary)),
        core(config, make_table(vocabulary_.pieces, vocabulary_.decoding)),
        worker(config.cache) {
    for (int32_t i = 0; i < config.num_clients; ++i) {
      clients.emplace_back(static_cast<uint16_t>(i));
    }
  }

  // False if there was nothing to do. An asynchronous engine's worker answers a plan once it has
  // the next, or there is none.
  bool step() {
    const bool planned = core.num_outstanding() < core.max_outstanding() && begin_step();
    const bool ends = core.num_outstanding() > 0 &&
                      (!planned || core.num_outstanding() == core.max_outstanding());
    if (ends) finish_step();
    take_outputs();
    return planned || ends;
  }
  // False if the plan is empty.
  bool begin_step() {
    const auto plan = core.begin_step();
    core.check_invariants();
    if (!plan.empty()) plans.emplace_back(plan.begin(), plan.end());
    return !plan.empty();
  }
  // The worker's result of the oldest plan.
  void finish_step() {
    const std::vector<int32_t> plan = std::move(plans.front());
    plans.pop_front();
    core.finish_step(worker.execute(plan));
    core.check_invariants();
  }

  void take_outputs() {
    for (size_t i = 0; i < clients.size(); ++i) {
      if (const auto message = core.take_outputs(static_cast<uint16_t>(i))) {
        clients[i].take(*message);
      }
    }
  }

  void run_until_idle(int32_t max_steps = 20000) {
    while (core.has_work()) {
      ASSERT_GT(max_steps--, 0) << "the engine does not come to an end";
      step();
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_TRUE(core.begin_step().empty());
    expect_idle();
  }
  void expect_idle() {
    take_outputs();
    EXPECT_EQ(core.stats().kv_used_blocks, 0);
    EXPECT_EQ(core.stats().num_running, 0);
    EXPECT_EQ(core.stats().num_waiting, 0);
  }

  const Sample& sample(RequestKey key, int32_t index = 0) {
    return clients.at(client_of(key)).sample(key, index);
  }
  Sample solo(const RequestInput& input, int32_t index = 0) const {
    return solo_run(input, index, vocabulary_, config_.scheduler.max_model_len,
                    config_.cache.sliding_window);
  }
  std::vector<Sample> solo_beams(const RequestInput& input) const {
    return solo_beam_search(input, vocabulary_, config_.scheduler.max_model_len,
                            config_.cache.sliding_window);
  }
  // The beam search has given what it gives alone, or the error that it ends with.
  void expect_solo_beams(const RequestInput& input) {
    SCOPED_TRACE("beam search " + std::to_string(input.key));
    const std::vector<Sample> expected = solo_beams(input);
    ASSERT_EQ(clients.at(client_of(input.key)).num_samples(input.key), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      const Sample& got = sample(input.key, static_cast<int32_t>(i));
      EXPECT_EQ(got.tokens, expected[i].tokens);
      EXPECT_EQ(got.text, expected[i].text);
      EXPECT_EQ(got.finish_reason, expected[i].finish_reason);
      EXPECT_EQ(got.stop_token, expected[i].stop_token);
      EXPECT_EQ(got.logprobs, expected[i].logprobs);
      EXPECT_EQ(got.message.empty(), expected[i].finish_reason != "error");
    }
  }
  // Every sample of the request has given what it gives alone.
  void expect_solo(const RequestInput& input) {
    for (int32_t i = 0; i < input.num_samples; ++i) {
      SCOPED_TRACE("request " + std::to_string(input.key) + " sample " + std::to_string(i));
      const Sample& got = sample(input.key, i);
      const Sample expected = solo(input, i);
      EXPECT_EQ(got.tokens, expected.tokens);
      EXPECT_EQ(got.finish_reason, expected.finish_reason);
      EXPECT_EQ(got.stop_token, expected.stop_token);
      EXPECT_EQ(got.stop_string, expected.stop_string);
      EXPECT_EQ(got.logprobs, expected.logprobs);
      EXPECT_EQ(got.vector, expected.vector);
      if (expected.finish_reason != "error") {
        EXPECT_EQ(got.prompt_logprobs, expected.prompt_logprobs);
      }
      if (expected.finish_reason == "error") {
        EXPECT_TRUE(expected.text.starts_with(got.text));
        EXPECT_FALSE(got.message.empty());
      } else {
        EXPECT_EQ(got.text, expected.text);
        EXPECT_EQ(got.message, "");
      }
    }
    EXPECT_EQ(clients.at(client_of(input.key)).num_samples(input.key),
              static_cast<size_t>(input.num_samples));
  }

 private:
  const EngineCoreConfig config_;
  const Vocabulary vocabulary_;

 public:
  EngineCore core;
  FakeWorker worker;
  std::vector<Client> clients;
  std::deque<std::vector<int32_t>> plans;  // on their way
};

class EngineTest : public ::testing::Test {
 protected:
  EngineTest() {
    config_.scheduler.max_num_seqs = 8;
    config_.scheduler.max_num_batched_tokens = 64;
    config_.scheduler.max_model_len = 128;
    config_.cache = {.num_blocks = 64, .block_size = 4};
  }

  Engine& engine() {
    if (engine_ == nullptr) engine_ = std::make_unique<Engine>(config_, vocabulary_);
    return *engine_;
  }
  EngineCore& core() { return engine().core; }

  // Keys count up, client 0.
  RequestInput request(std::vector<TokenId> prompt, int32_t max_tokens) {
    RequestInput input;
    input.key = make_key(0, next_key_++);
    input.prompt = std::move(prompt);
    input.max_tokens = max_tokens;
    input.sampling.row.seed_low = 17;
    input.sampling.stop_ids = input.eos_ids = {kEos};
    return input;
  }
  // A request that gives `output`, and then ends for its length if for nothing else.
  RequestInput scripted(const std::vector<TokenId>& output) {
    return request(script(output), static_cast<int32_t>(output.size()));
  }
  // A prompt without a script, different from others of another number; outputs are up to the
  // model.
  static std::vector<TokenId> prompt(int32_t length, TokenId number = 1) {
    std::vector<TokenId> tokens(static_cast<size_t>(length), 2);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>((i * 7 + 3) % 20);
    if (!tokens.empty()) tokens[0] = 100 + number;
    return tokens;
  }
  // A request that does not end before its length.
  RequestInput endless(int32_t prompt_length, int32_t max_tokens, TokenId number = 1) {
    RequestInput input = request(prompt(prompt_length, number), max_tokens);
    input.sampling.stop_ids.clear();
    input.eos_ids.clear();
    return input;
  }
  // Runs it to its end; the first sample.
  const Sample& run(const RequestInput& input) {
    core().submit(input);
    engine().run_until_idle();
    engine().expect_solo(input);
    return engine().sample(input.key);
  }

  EngineCoreConfig config_;
  Vocabulary vocabulary_ = byte_level_vocabulary();
  std::unique_ptr<Engine> engine_;
  uint64_t next_key_ = 1;
};

}  // namespace vllm_lite::testing
