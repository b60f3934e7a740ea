// Beam search through the engine core: results, memory, what ends it early. Random mixes of them
// with everything else are in engine_soak_test.
#include "engine_fixture.h"

namespace vllm_lite::testing {
namespace {

struct EngineBeams : EngineTest, ::testing::WithParamInterface<bool> {
  EngineBeams() { config_.async_scheduling = GetParam(); }

  RequestInput search(int32_t width, int32_t prompt_length, int32_t max_tokens,
                      TokenId number = 1) {
    RequestInput input = request(prompt(prompt_length, number), max_tokens);
    input.beam_search.width = width;
    input.sampling.row.num_logprobs = width + 1;
    return input;
  }
  void run_search(const RequestInput& input) {
    core().submit(input);
    engine().run_until_idle();
    engine().expect_solo_beams(input);
  }
};

TEST_P(EngineBeams, EveryWidthGivesItsSequencesBestFirst) {
  for (int32_t width = 1; width <= 8; ++width) {
    RequestInput input = search(width, 9, 20);
    run_search(input);
    EXPECT_EQ(engine().clients[0].num_samples(input.key), static_cast<size_t>(width));
  }
  EXPECT_GT(engine().worker.num_copies, 0);
  EXPECT_EQ(engine().worker.num_placeholders, 0);
}

TEST_P(EngineBeams, StopIdsThatAreNoEosEndSequencesWithTheirReason) {
  int32_t num_stopped = 0;
  for (TokenId stop = 10; stop < 40; stop += 5) {
    RequestInput input = search(3, 5, 12, stop);
    input.sampling.stop_ids = {kEos, stop, stop + 1};
    input.sampling.row.num_logprobs = 3 + 3;
    input.beam_search.length_penalty = -1;
    run_search(input);
    for (int32_t i = 0; i < 3; ++i) num_stopped += engine().sample(input.key, i).stop_token >= 0;
  }
  EXPECT_GT(num_stopped, 0);
}

TEST_P(EngineBeams, BeamsShareBlocksAndGiveBackThoseOfBeamsThatEnd) {
  config_.cache = {.num_blocks = 200, .block_size = 4};
  core().submit(search(8, 65, 60));
  int64_t most = 0;
  while (core().has_work()) {
    engine().step();
    most = std::max(most, core().stats().kv_used_blocks);
  }
  engine().expect_idle();
  // 16 blocks of the prompt once; of the rest at most 8 times 16.
  EXPECT_LE(most, 16 + 8 * 16);
  EXPECT_GE(most, 16 + 15);
}

TEST_P(EngineBeams, ThatArePreemptedBeginAgainAndGiveTheSame) {
  config_.cache = {.num_blocks = 30, .block_size = 4, .enable_prefix_caching = false};
  config_.scheduler.max_model_len = 40;
  std::vector<RequestInput> inputs;
  for (TokenId i = 0; i < 6; ++i) {
    inputs.push_back(i % 2 == 0 ? search(3, 10, 24, i) : endless(10, 24, i));
    core().submit(inputs.back());
  }
  engine().run_until_idle();
  EXPECT_GT(core().stats().num_preemptions, 0);
  for (const RequestInput& input : inputs) {
    if (input.beam_search.width > 0) {
      engine().expect_solo_beams(input);
    } else {
      engine().expect_solo(input);
    }
  }
}

TEST_P(EngineBeams, AnAbortInTheMiddleGivesEverythingBack) {
  for (int32_t num_steps = 0; num_steps < 12; ++num_steps) {
    const RequestInput input = search(4, 21, 30, num_steps);
    core().submit(input);
    for (int32_t i = 0; i < num_steps; ++i) engine().step();
    core().abort(input.key);
    engine().run_until_idle();
    EXPECT_TRUE(engine().sample(input.key).tokens.empty());
  }
}

TEST_P(EngineBeams, AStepThatFailsEndsTheSearchWithOneError) {
  const RequestInput input = search(4, 6, 30);
  core().submit(input);
  engine().worker.fails = [](const PlanView& plan) {
    return plan.step() == 5 ? std::string("out of order") : std::string();
  };
  engine().run_until_idle();
  EXPECT_EQ(engine().clients[0].num_samples(input.key), 1u);
  EXPECT_EQ(engine().sample(input.key).finish_reason, "error");
  EXPECT_EQ(engine().sample(input.key).message, "out of order");
}

TEST_P(EngineBeams, ARowWithoutFiniteLogitsEndsTheSearchWithOneError) {
  RequestInput input = search(3, 6, 30);
  input.prompt[4] = kScriptFails;
  run_search(input);
  EXPECT_EQ(engine().sample(input.key).finish_reason, "error");
}

// BEM-01: never ended.
TEST_P(EngineBeams, WiderThanMayRunIsRefusedAtOnce) {
  config_.scheduler.max_num_seqs = 3;
  const RequestInput input = search(4, 2, 10);
  core().submit(input);
  engine().run_until_idle();
  EXPECT_EQ(engine().sample(input.key).finish_reason, "refused");
  EXPECT_NE(engine().sample(input.key).message.find("only 3 sequences may run"), std::string::npos);
  run_search(search(3, 2, 10, 2));
}

TEST_P(EngineBeams, MoreThanThePoolHoldsIsRefusedAtOnceAndThatMuchRuns) {
  config_.cache = {.num_blocks = 17, .block_size = 4};
  config_.scheduler.max_model_len = 20;
  // One block of the prompt is shared, 4 more for each.
  const RequestInput fits = search(4, 6, 14);
  run_search(fits);
  EXPECT_EQ(engine().sample(fits.key).message, "");
  const RequestInput input = search(5, 6, 14);
  core().submit(input);
  engine().run_until_idle();
  EXPECT_EQ(engine().sample(input.key).finish_reason, "refused");
  EXPECT_NE(engine().sample(input.key).message.find("up to 21 blocks"), std::string::npos);
}

TEST_P(EngineBeams, RunInChunksBesideOthersAndBehindAWindow) {
  config_.scheduler.max_chunk_tokens = 5;
  for (const int32_t window : {0, 6}) {
    config_.cache.sliding_window = window;
    engine_.reset();
    std::vector<RequestInput> inputs;
    for (TokenId i = 0; i < 5; ++i) {
      inputs.push_back(search(3, 30, 20, i));
      core().submit(inputs.back());
      core().submit(endless(30, 20, 50 + i));
    }
    engine().run_until_idle();
    for (const RequestInput& input : inputs) engine().expect_solo_beams(input);
  }
}

INSTANTIATE_TEST_SUITE_P(Async, EngineBeams, ::testing::Bool());

}  // namespace
}  // namespace vllm_lite::testing
