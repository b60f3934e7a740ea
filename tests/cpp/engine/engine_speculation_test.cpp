// Speculation: every request gives what it gives without, in fewer steps. Random mixes are in
// engine_mix_test and engine_soak_test.
#include <algorithm>
#include <string>

#include "engine_fixture.h"

namespace vllm_lite::testing {
namespace {

// `size` tokens: `cycle` again and again.
std::vector<TokenId> repeat(const std::vector<TokenId>& cycle, size_t size) {
  std::vector<TokenId> tokens;
  while (tokens.size() < size) tokens.push_back(cycle[tokens.size() % cycle.size()]);
  return tokens;
}

// How many tokens may be drafted.
struct EngineSpeculation : EngineTest, ::testing::WithParamInterface<int32_t> {
  EngineSpeculation() {
    config_.scheduler.num_speculative_tokens = GetParam();
    config_.ngram = {.prompt_lookup_min = 1, .prompt_lookup_max = 3};
  }

  // A request that gives `output`, which its prompt says once more in plain tokens: from the second
  // token on the drafts are what comes next in it.
  RequestInput quoting(const std::vector<TokenId>& output) {
    std::vector<TokenId> tokens = script(output);
    tokens.insert(tokens.end(), output.begin(), output.end());
    return request(tokens, static_cast<int32_t>(output.size()));
  }
  void run_all(const std::vector<RequestInput>& inputs) {
    for (const RequestInput& input : inputs) core().submit(input);
    engine().run_until_idle();
    for (const RequestInput& input : inputs) engine().expect_solo(input);
  }
  // Steps until the oldest plan has drafts, which it leaves on its way.
  void begin_drafts() {
    for (int32_t left = 20; left > 0; --left) {
      ASSERT_TRUE(engine().begin_step());
      if (PlanView(engine().plans.front()).header().num_drafts > 0) return;
      engine().finish_step();
    }
    FAIL() << "no drafts";
  }
  EngineStats stats() { return core().stats(); }
};

TEST_P(EngineSpeculation, ARepetitionTakesFewerStepsAndTheStatsSaySo) {
  const RequestInput input = scripted(repeat({2, 3}, 24));
  run_all({input});
  // The third token is the first that has been there before.
  const int32_t per_step = GetParam() + 1;
  EXPECT_EQ(stats().num_steps, 3 + (21 + per_step - 1) / per_step);
  EXPECT_EQ(stats().num_accepted_tokens, 24 - stats().num_steps);
  EXPECT_EQ(stats().num_draft_tokens, stats().num_accepted_tokens);
  EXPECT_GE(stats().num_draft_tokens, stats().num_drafts);
  EXPECT_EQ(engine().clients[0].stats.num_accepted_tokens, stats().num_accepted_tokens);
}

TEST_P(EngineSpeculation, WrongDraftsChangeNothing) {
  std::vector<TokenId> output;
  for (TokenId i = 0; i < 30; ++i) output.push_back(i % 2 == 0 ? 2 : 3 + i % 19);
  const RequestInput other = endless(9, 40);
  run_all({scripted(output), other});
  EXPECT_GT(stats().num_draft_tokens, stats().num_accepted_tokens + 10);
}

TEST_P(EngineSpeculation, AfterAWrongDraftFewerAreTriedAndTwiceAsManyAfterRightOnes) {
  std::vector<TokenId> output = repeat({2, 3}, 60);
  for (const size_t at : {11U, 25U, 26U, 40U}) output[at] = 22;
  const RequestInput input = scripted(output);
  core().submit(input);
  int32_t expected = GetParam();
  int32_t num_cut = 0;
  while (engine().sample(input.key).tokens.size() < 50) {
    ASSERT_TRUE(engine().begin_step());
    const int32_t num_drafts = PlanView(engine().plans.front()).header().num_drafts;
    const int64_t before = stats().num_accepted_tokens;
    engine().finish_step();
    engine().take_outputs();
    if (num_drafts == 0) continue;
    EXPECT_EQ(num_drafts, expected);
    num_cut += num_drafts < GetParam();
    const auto num_right = static_cast<int32_t>(stats().num_accepted_tokens - before);
    expected =
        num_right == num_drafts ? std::min(2 * num_drafts, GetParam()) : std::max(num_right, 1);
  }
  EXPECT_EQ(num_cut > 0, GetParam() > 1);
  engine().run_until_idle();
  engine().expect_solo(input);
}

TEST_P(EngineSpeculation, RequestsOfDifferentRepetitionsRunTogether) {
  std::vector<RequestInput> inputs;
  for (TokenId i = 0; i < 8; ++i) {
    std::vector<TokenId> cycle;
    for (TokenId token = 0; token <= i % 4; ++token) cycle.push_back(2 + token);
    std::vector<TokenId> output = repeat(cycle, static_cast<size_t>(20 + i));
    output[static_cast<size_t>(9 + i)] = 22;
    inputs.push_back(i % 2 == 0 ? scripted(output) : quoting(output));
  }
  run_all(inputs);
  EXPECT_GT(stats().num_accepted_tokens, 50);
  EXPECT_GT(stats().num_draft_tokens, stats().num_accepted_tokens);
}

TEST_P(EngineSpeculation, StopStringsEndAtTheirTokenThoughMoreWasAccepted) {
  for (size_t times = 1; times <= 7; ++times) {
    for (const bool is_included : {false, true}) {
      RequestInput input = scripted(repeat({2, 3}, 30));
      std::string stop;
      for (size_t i = 0; i < times; ++i) stop += "ab";
      input.stops = {"never", stop};
      input.include_stop_in_output = is_included;
      EXPECT_EQ(run(input).tokens.size(), 2 * times);
    }
  }
  EXPECT_GT(stats().num_accepted_tokens, 0);
}

TEST_P(EngineSpeculation, StopIdsEndAtTheirTokenThoughMoreWasAccepted) {
  for (size_t at = 1; at < 9; ++at) {
    std::vector<TokenId> output = {2, 3, 4, 5, 6, 7, 8, 9, 10};
    output[at] = kEos;
    EXPECT_EQ(run(quoting(output)).tokens.size(), at + 1);
    output[at] = 17;
    RequestInput input = quoting(output);
    input.sampling.stop_ids.push_back(17);
    const Sample& sample = run(input);
    EXPECT_EQ(sample.tokens.size(), at + 1);
    EXPECT_EQ(sample.stop_token, 17);
  }
  EXPECT_GT(stats().num_accepted_tokens, 20);
}

TEST_P(EngineSpeculation, MaxTokensAndMaxModelLenAreMetExactly) {
  for (int32_t max_tokens = 1; max_tokens < 15; ++max_tokens) {
    RequestInput input = scripted(repeat({2, 3}, 20));
    input.max_tokens = max_tokens;
    EXPECT_EQ(run(input).tokens.size(), static_cast<size_t>(max_tokens));
    EXPECT_EQ(engine().sample(input.key).finish_reason, "length");
  }
  engine_.reset();
  config_.scheduler.max_model_len = 33;
  for (size_t size = 16; size < 32; ++size) {
    RequestInput input = scripted(repeat({2, 3}, size));
    input.max_tokens = 2147483647;
    input.sampling.stop_ids.clear();
    EXPECT_EQ(run(input).tokens.size(), 33 - size);
  }
}

TEST_P(EngineSpeculation, MinTokensHoldForEachTokenOfAStep) {
  for (int32_t min_tokens = 0; min_tokens < 14; ++min_tokens) {
    RequestInput input = scripted(repeat({2, 3, 17}, 24));
    input.stops = {"stop"};
    input.min_tokens = min_tokens;
    EXPECT_EQ(run(input).tokens.size(), static_cast<size_t>(std::max(min_tokens + 2, 3) / 3 * 3));
  }
}

TEST_P(EngineSpeculation, EachTokenHasItsOwnLogprobs) {
  std::vector<RequestInput> inputs;
  for (int32_t i = 0; i < 6; ++i) {
    inputs.push_back(scripted(repeat({2, 3, 4}, static_cast<size_t>(20 + i))));
    inputs.back().sampling.row.num_logprobs = i - 1;  // the first has none
  }
  run_all(inputs);
  EXPECT_EQ(engine().sample(inputs[3].key).logprobs.size(), 23u);
}

TEST_P(EngineSpeculation, PromptLogprobsAndVectorsBesideDraftsAreRight) {
  config_.scheduler.max_chunk_tokens = 7;
  std::vector<RequestInput> inputs;
  for (TokenId i = 0; i < 4; ++i) {
    inputs.push_back(quoting(repeat({2, 3, 4}, 18)));
    inputs.back().num_prompt_logprobs = i;
    inputs.back().sampling.row.num_logprobs = 3 - i;
    inputs.push_back(endless(30, 0, i));
    inputs.back().pooling = i % 2 == 0 ? Pooling::kMean : Pooling::kLast;
  }
  run_all(inputs);
  EXPECT_EQ(engine().sample(inputs[2].key).prompt_logprobs.size(), 35u);
  EXPECT_GT(stats().num_accepted_tokens, 20);
}

TEST_P(EngineSpeculation, ARowThatFailsEndsAtItsTokenAndAlone) {
  for (size_t at = 0; at < 12; ++at) {
    std::vector<TokenId> output = repeat({2, 3}, 24);
    output[at] = -1;
    const RequestInput broken = scripted(output);
    run_all({broken, scripted(repeat({2, 3}, 24))});
    EXPECT_EQ(engine().sample(broken.key).finish_reason, "error");
    EXPECT_EQ(engine().sample(broken.key).tokens.size(), at);
  }
}

TEST_P(EngineSpeculation, ARowThatFailsAtAWrongDraftGoesOn) {
  const RequestInput input = scripted({2, 3, 4, 5, 2, 9, 10, 11});
  core().submit(input);
  begin_drafts();  // 3 4 5 2 3, after the second 2
  std::vector<int32_t> result = engine().worker.execute(engine().plans.front());
  engine().plans.clear();
  ASSERT_EQ(StepResultView(result).token_ids()[0], 9);
  constexpr size_t kTokens = sizeof(ResultHeader) / sizeof(int32_t);
  for (size_t i = 1; i < StepResultView(result).token_ids().size(); ++i) {
    result[kTokens + i] = i % 2 == 0 ? kNoToken : kAllMasked;
  }
  core().finish_step(result);
  engine().run_until_idle();
  engine().expect_solo(input);
}

TEST_P(EngineSpeculation, SamplesAndBeamsRunBeside) {
  RequestInput samples = quoting(repeat({2, 3, 4}, 20));
  samples.num_samples = 3;
  RequestInput search = request(prompt(9), 20);
  search.beam_search.width = 3;
  search.sampling.row.num_logprobs = 4;
  const RequestInput single = scripted(repeat({2, 3}, 30));
  for (const RequestInput& input : {samples, search, single}) core().submit(input);
  engine().run_until_idle();
  engine().expect_solo(samples);
  engine().expect_solo_beams(search);
  engine().expect_solo(single);
  EXPECT_GT(stats().num_accepted_tokens, 30);
}

TEST_P(EngineSpeculation, PreemptedSequencesGoOnWithDrafts) {
  config_.cache.num_blocks = 24;
  config_.scheduler.max_model_len = 80;
  std::vector<RequestInput> inputs;
  for (TokenId i = 0; i < 6; ++i) {
    inputs.push_back(scripted(repeat({2, 3, static_cast<TokenId>(4 + i)}, 30)));
  }
  run_all(inputs);
  EXPECT_GT(stats().num_preemptions, 0);
  EXPECT_GT(stats().num_accepted_tokens, 60);
}

TEST_P(EngineSpeculation, AbortWhileDraftsAreInFlight) {
  const RequestInput aborted = scripted(repeat({2, 3}, 30));
  const RequestInput other = scripted(repeat({2, 3}, 30));
  core().submit(aborted);
  core().submit(other);
  begin_drafts();
  core().abort(aborted.key);
  engine().finish_step();  // is seen by the next plan: this step gives its own
  engine().take_outputs();
  EXPECT_EQ(engine().sample(aborted.key).tokens, repeat({2, 3}, 4 + GetParam()));
  engine().run_until_idle();
  EXPECT_FALSE(engine().sample(aborted.key).finished());
  EXPECT_EQ(engine().sample(aborted.key).tokens, repeat({2, 3}, 4 + GetParam()));
  engine().expect_solo(other);
}

TEST_P(EngineSpeculation, AStepWithDraftsThatFailsEndsItsOwnAlone) {
  config_.scheduler.max_num_seqs = 1;
  for (const bool says_so : {true, false}) {
    const RequestInput failed = scripted(repeat({2, 3}, 30));
    const RequestInput waiting = scripted(repeat({2, 3}, 30));
    core().submit(failed);
    core().submit(waiting);
    begin_drafts();
    if (says_so) {
      engine().worker.fails = [](const PlanView&) { return "no"; };
      engine().finish_step();
      engine().worker.fails = {};
    } else {
      engine().plans.clear();
      core().fail_step("no");
    }
    engine().run_until_idle();
    EXPECT_EQ(engine().sample(failed.key).message, "no");
    EXPECT_EQ(engine().sample(failed.key).tokens, repeat({2, 3}, 3));
    engine().expect_solo(waiting);
  }
}

TEST_P(EngineSpeculation, AResultWithoutTheTokensAfterDraftsIsNone) {
  const RequestInput input = scripted(repeat({2, 3}, 30));
  core().submit(input);
  begin_drafts();
  const uint64_t step = PlanView(engine().plans.front()).step();
  engine().plans.clear();
  EXPECT_THROW(core().finish_step(make_result(step, {{.token = 3, .logprobs = {}}}, -1)),
               InternalError);
  core().check_invariants();
  engine().run_until_idle();
  EXPECT_EQ(engine().sample(input.key).finish_reason, "error");
  run(scripted(repeat({2, 3}, 30)));
}

INSTANTIATE_TEST_SUITE_P(Tokens, EngineSpeculation, ::testing::Range(1, 6));

struct EngineSpeculationConfig : EngineTest {
  std::string error() {
    try {
      Engine engine(config_);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(EngineSpeculationConfig, AsynchronousSchedulingAndLengthsOutOfRangeAreRefused) {
  config_.scheduler.num_speculative_tokens = 2;
  EXPECT_EQ(error(), "");
  config_.ngram = {.prompt_lookup_min = 3, .prompt_lookup_max = 2};
  EXPECT_NE(error().find("prompt_lookup_min is 3 and prompt_lookup_max 2"), std::string::npos);
  config_.ngram = {.prompt_lookup_min = 1, .prompt_lookup_max = kMaxPromptLookup + 1};
  EXPECT_NE(error().find("prompt_lookup_max 65"), std::string::npos);
  config_.ngram = {.prompt_lookup_min = 0, .prompt_lookup_max = 2};
  EXPECT_NE(error().find("prompt_lookup_min is 0"), std::string::npos);
  config_.async_scheduling = true;
  config_.ngram = {};
  EXPECT_NE(error().find("speculation and asynchronous scheduling"), std::string::npos);
  config_.scheduler.num_speculative_tokens = 0;
  config_.ngram = {.prompt_lookup_min = 3, .prompt_lookup_max = 2};  // nobody asks for it
  EXPECT_EQ(error(), "");
}

}  // namespace
}  // namespace vllm_lite::testing
