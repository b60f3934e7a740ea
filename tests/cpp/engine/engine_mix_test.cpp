// The same requests in every mix: alone, batched, in chunks, preempted, with and without cached
// prefixes, each with asynchronous scheduling, with speculation and with neither. Each gives what
// it gives alone.
#include <tuple>

#include "engine_fixture.h"

namespace vllm_lite::testing {
namespace {

struct Mix {
  const char* name;
  EngineCoreConfig config;
  bool one_at_a_time = false;
};

Mix make_mix(const char* name, void (*change)(EngineCoreConfig&)) {
  Mix mix{name, {}, std::string(name) == "alone"};
  mix.config.scheduler.max_num_seqs = 16;
  mix.config.scheduler.max_num_batched_tokens = 256;
  mix.config.scheduler.max_model_len = 96;
  mix.config.cache = {.num_blocks = 512, .block_size = 4};
  change(mix.config);
  return mix;
}

enum class Mode { kPlain, kAsync, kSpeculative };

struct EngineMix : EngineTest, ::testing::WithParamInterface<std::tuple<Mix, Mode>> {};

// SMP-08
TEST_P(EngineMix, GivesWhatEachRequestGivesAlone) {
  const auto& [mix, mode] = GetParam();
  config_ = mix.config;
  config_.async_scheduling = mode == Mode::kAsync;
  if (mode == Mode::kSpeculative) {
    config_.scheduler.num_speculative_tokens = 3;
    config_.scheduler.max_num_logits = 24;
    config_.ngram = {.prompt_lookup_min = 1, .prompt_lookup_max = 3};
  }
  std::vector<RequestInput> inputs;
  for (TokenId i = 0; i < 40; ++i) {
    // Half share a prompt's beginning, some all of it.
    RequestInput input = request(prompt(3 + i % 5 * 9, i % 2 == 0 ? 7 : i), 8 + i % 7 * 6);
    if (i % 4 == 1) input.prompt = script({2, 3, 4, 2, 3, 4, 2, 3, 4});  // within any window
    input.sampling.row.seed_low = static_cast<uint32_t>(i / 3);
    input.num_samples = i % 4 == 0 ? 3 : 1;
    input.priority = i % 3 - 1;
    if (i % 5 == 0) input.stops = {"ab", "\xC3\xA9", "stopa"};
    if (i % 6 == 0) input.sampling.row.num_logprobs = i % 4;
    if (i % 7 == 0) input.min_tokens = 5;
    if (i % 8 == 0) input.sampling.row.repetition_penalty = 1.5f;  // sends histories
    if (i % 10 == 3) input.salt = {1, 2};
    inputs.push_back(input);
    core().submit(input);
    if (mix.one_at_a_time) engine().run_until_idle();
    if (i % 4 == 3) engine().step();
  }
  engine().run_until_idle();
  for (const RequestInput& input : inputs) engine().expect_solo(input);
  const EngineStats stats = core().stats();
  const std::string name = mix.name;
  EXPECT_EQ(stats.prefix_hits > 0, config_.cache.enable_prefix_caching);
  EXPECT_EQ(stats.num_preemptions > 0, name == "tiny_pool" || name == "tiny_pool_priority");
  EXPECT_TRUE(engine().worker.num_copies > 0 || name != "batch");
  EXPECT_EQ(engine().worker.num_placeholders > 0, mode == Mode::kAsync);
  // The small budget is that of the tokens that run.
  EXPECT_EQ(stats.num_accepted_tokens > 0, mode == Mode::kSpeculative && name != "small_budget");
}

INSTANTIATE_TEST_SUITE_P(
    Mixes, EngineMix,
    ::testing::Combine(
        ::testing::Values(
            make_mix("alone", [](EngineCoreConfig&) {}),
            make_mix("batch", [](EngineCoreConfig&) {}),
            make_mix("chunks", [](EngineCoreConfig& c) { c.scheduler.max_chunk_tokens = 3; }),
            make_mix("small_budget",
                     [](EngineCoreConfig& c) { c.scheduler.max_num_batched_tokens = 5; }),
            make_mix("one_row", [](EngineCoreConfig& c) { c.scheduler.max_num_seqs = 1; }),
            make_mix("no_prefix_cache",
                     [](EngineCoreConfig& c) { c.cache.enable_prefix_caching = false; }),
            make_mix("window", [](EngineCoreConfig& c) { c.cache.sliding_window = 10; }),
            make_mix("tiny_pool", [](EngineCoreConfig& c) { c.cache.num_blocks = 26; }),
            make_mix("tiny_pool_priority",
                     [](EngineCoreConfig& c) {
                       c.cache.num_blocks = 26;
                       c.scheduler.policy = SchedulingPolicy::kPriority;
                       c.scheduler.max_chunk_tokens = 7;
                     })),
        ::testing::Values(Mode::kPlain, Mode::kAsync, Mode::kSpeculative)),
    [](const auto& mix) {
      const std::string name = std::get<0>(mix.param).name;
      const Mode mode = std::get<1>(mix.param);
      return mode == Mode::kAsync         ? name + "_async"
             : mode == Mode::kSpeculative ? name + "_speculative"
                                          : name;
    });

}  // namespace
}  // namespace vllm_lite::testing
