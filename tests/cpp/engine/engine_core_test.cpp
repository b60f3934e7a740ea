// Many requests at once: samples, queue, aborts, failures, clients.
#include <cmath>

#include "engine_fixture.h"

namespace vllm_lite::testing {
namespace {

struct EngineCoreTest : EngineTest {
  void submit_and_count(int32_t num_steps, const RequestInput& input) {
    core().submit(input);
    for (int32_t i = 0; i < num_steps; ++i) engine().step();
  }
  EngineStats stats() { return core().stats(); }
};

// --- samples, cache, order ---------------------------------------------------------------------

TEST_F(EngineCoreTest, SamplesForkThePromptAndCopyItsLastBlock) {
  RequestInput input = endless(10, 6);
  input.num_samples = 4;
  run(input);
  EXPECT_EQ(engine().worker.num_copies, 3);
  EXPECT_NE(engine().sample(input.key, 0).tokens, engine().sample(input.key, 1).tokens);
}

TEST_F(EngineCoreTest, FirstSampleMayEndBeforeTheOthersBegin) {
  config_.scheduler.max_num_seqs = 1;
  RequestInput input = endless(10, 3);
  input.num_samples = 5;
  run(input);
}

TEST_F(EngineCoreTest, SeedsOfSamplesCarryIntoTheHighWord) {
  RequestInput input = endless(4, 5);
  input.sampling.row.seed_low = 0xffffffff;
  input.sampling.row.seed_high = 3;
  input.num_samples = 2;
  run(input);
}

// USG-06
TEST_F(EngineCoreTest, CachedTokensAreReported) {
  run(endless(20, 4));
  const RequestInput again = endless(20, 4);
  EXPECT_EQ(run(again).num_cached_tokens, 16);
}

TEST_F(EngineCoreTest, AnotherSaltSharesNoPrefix) {
  run(endless(20, 4));
  RequestInput salted = endless(20, 4);
  salted.salt = {0, 1};
  EXPECT_EQ(run(salted).num_cached_tokens, 0);
  salted.key = make_key(0, next_key_++);
  EXPECT_EQ(run(salted).num_cached_tokens, 16);
}

TEST_F(EngineCoreTest, UrgentRequestsRunFirst) {
  config_.scheduler.policy = SchedulingPolicy::kPriority;
  config_.scheduler.max_num_seqs = 1;
  const RequestInput patient = endless(5, 5, 1);
  RequestInput urgent = endless(5, 5, 2);
  urgent.priority = -1;
  core().submit(patient);
  core().submit(urgent);
  while (!engine().sample(urgent.key).finished()) ASSERT_TRUE(engine().step());
  EXPECT_TRUE(engine().sample(patient.key).tokens.empty());
  engine().run_until_idle();
  engine().expect_solo(patient);
}

TEST_F(EngineCoreTest, StatsAreThoseOfTheStep) {
  submit_and_count(1, endless(9, 50));
  EXPECT_EQ(stats().num_running, 1);
  EXPECT_EQ(stats().num_steps, 1);
  EXPECT_EQ(stats().kv_used_blocks, 3);
  EXPECT_EQ(stats().kv_total_blocks, 64);
  EXPECT_EQ(engine().clients[0].stats.kv_used_blocks, 3);
}

// --- what cannot run ---------------------------------------------------------------------------

TEST_F(EngineCoreTest, WhatCannotRunIsRefusedWithTheReason) {
  config_.scheduler.max_model_len = 32;
  config_.scheduler.max_num_waiting = 8;
  const auto refused = [&](RequestInput input, const std::string& reason) {
    core().submit(input);
    engine().run_until_idle();
    for (int32_t i = 0; i < input.num_samples; ++i) {
      const Sample& sample = engine().sample(input.key, i);
      EXPECT_EQ(sample.finish_reason, "refused");
      EXPECT_NE(sample.message.find(reason), std::string::npos) << sample.message;
    }
  };
  refused(endless(0, 5), "at least one");
  refused(endless(32, 5), "max_model_len, which is 32");
  refused(endless(5, -1), "max_tokens");
  refused(endless(5, -2147483647), "max_tokens");
  RequestInput input = endless(5, 5);
  input.pooling = Pooling::kLast;
  refused(input, "pooling");
  input = endless(5, 5);
  input.stops = {"a", ""};
  input.num_samples = 3;
  refused(input, "stop[1]");
  input = endless(5, 5);
  input.sampling.bias_ids = {1, 2};
  input.sampling.bias_values = {1.0f};
  refused(input, "logit_bias");
  input = endless(5, 5);
  input.num_samples = 9;
  refused(input, "n is 9");
  run(endless(31, 1));
}

TEST_F(EngineCoreTest, SubmitThrowsWhatNobodyCouldBeTold) {
  RequestInput input = endless(5, 5);
  input.key = make_key(1, 1);
  EXPECT_THROW(core().submit(input), Error);
  input = endless(5, 5);
  input.num_samples = 0;
  EXPECT_THROW(core().submit(input), Error);
  EXPECT_THROW(core().take_outputs(1), Error);
  config_.num_clients = 0;
  EXPECT_THROW(std::make_unique<Engine>(config_), Error);
  EXPECT_FALSE(core().has_work());
}

// ABT-05
TEST_F(EngineCoreTest, FullQueueRefusesAllSamplesAndKeepsNothing) {
  config_.scheduler.max_num_seqs = 2;
  config_.scheduler.max_num_waiting = 5;
  std::vector<RequestInput> running = {endless(5, 30, 1), endless(5, 30, 2)};
  for (const RequestInput& input : running) submit_and_count(1, input);
  RequestInput waiting = endless(5, 5, 3);
  waiting.num_samples = 3;
  submit_and_count(1, waiting);
  RequestInput too_many = endless(5, 5, 4);
  too_many.num_samples = 3;
  submit_and_count(1, too_many);
  RequestInput fits = endless(5, 5, 5);
  fits.num_samples = 2;
  submit_and_count(1, fits);
  EXPECT_EQ(stats().num_waiting, 5);
  for (int32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(engine().sample(too_many.key, i).finish_reason, "queue_full");
    EXPECT_NE(engine().sample(too_many.key, i).message.find("5 sequences"), std::string::npos);
  }
  engine().run_until_idle();
  for (const RequestInput& input : {running[0], running[1], waiting, fits}) {
    engine().expect_solo(input);
  }
}

TEST_F(EngineCoreTest, KeyThatIsTakenIsRefused) {
  const RequestInput input = endless(5, 5);
  core().submit(input);
  core().submit(input);
  ASSERT_FALSE(core().begin_step().empty());
  const Message message = read_message(*core().take_outputs(0));
  ASSERT_EQ(message.outputs.size(), 1U);
  EXPECT_EQ(message.outputs[0].finish_reason, "refused");
  EXPECT_NE(message.outputs[0].message.find("key"), std::string::npos);
  EXPECT_EQ(message.stats.num_waiting, 1);
}

TEST_F(EngineCoreTest, KeyMayBeUsedAgainOnceItsRequestIsGone) {
  RequestInput input = endless(5, 5);
  core().submit(input);
  core().abort(input.key);
  core().submit(input);  // all three in one step's inbox
  engine().run_until_idle();
  engine().expect_solo(input);
}

// --- aborts ------------------------------------------------------------------------------------

TEST_F(EngineCoreTest, AbortBeforeItWasSeenGivesNothing) {
  const RequestInput input = endless(5, 5);
  core().submit(input);
  core().abort(input.key);
  engine().run_until_idle();
  EXPECT_EQ(engine().clients[0].num_samples(input.key), 0U);
}

TEST_F(EngineCoreTest, AbortOfUnknownAndFinishedKeysIsNothing) {
  core().abort(make_key(0, 99));
  core().abort(make_key(7, 99));
  const RequestInput input = endless(5, 3);
  run(input);
  core().abort(input.key);
  EXPECT_TRUE(core().has_work());
  engine().run_until_idle();
  EXPECT_FALSE(core().has_work());
}

// ABT-01
TEST_F(EngineCoreTest, AbortWhileRunningFreesItsBlocksInTheNextStep) {
  const RequestInput aborted = endless(30, 50, 1), other = endless(5, 20, 2);
  core().submit(aborted);
  submit_and_count(3, other);
  EXPECT_GT(stats().kv_used_blocks, 8);
  core().abort(aborted.key);
  engine().step();
  EXPECT_LE(stats().kv_used_blocks, 3);
  EXPECT_EQ(stats().num_running, 1);
  engine().run_until_idle();
  engine().expect_solo(other);
  EXPECT_EQ(engine().sample(aborted.key).tokens.size(), 3U);
}

TEST_F(EngineCoreTest, AbortWhileTheStepIsInFlight) {
  const RequestInput input = endless(30, 50);
  core().submit(input);
  for (int32_t i = 0; i < 3; ++i) {
    const auto plan = core().begin_step();
    if (i == 2) core().abort(input.key);
    core().finish_step(engine().worker.execute(plan));
  }
  EXPECT_TRUE(core().begin_step().empty());
  core().check_invariants();
  engine().expect_idle();
  EXPECT_EQ(engine().sample(input.key).tokens.size(), 3U);  // the step in flight gave its own
}

TEST_F(EngineCoreTest, AbortWhileAFailingStepIsInFlight) {
  const RequestInput input = endless(30, 50);
  core().submit(input);
  ASSERT_FALSE(core().begin_step().empty());
  core().abort(input.key);
  core().fail_step("no");
  engine().run_until_idle();
  EXPECT_EQ(engine().sample(input.key).finish_reason, "error");
}

// ABT-05
TEST_F(EngineCoreTest, AbortWhileWaitingForBlocksThatACachedPrefixHas) {
  config_.cache.num_blocks = 16;
  config_.scheduler.max_model_len = 64;
  run(endless(40, 4, 7));
  const RequestInput running = endless(8, 40, 1);
  submit_and_count(20, running);
  const RequestInput waiting = endless(48, 4, 7);
  submit_and_count(2, waiting);
  EXPECT_EQ(stats().num_waiting, 1);
  const int64_t used = stats().kv_used_blocks;
  core().abort(waiting.key);
  engine().step();
  EXPECT_EQ(stats().num_waiting, 0);
  EXPECT_LE(stats().kv_used_blocks, used + 1);
  engine().run_until_idle();
  engine().expect_solo(running);
  EXPECT_EQ(engine().clients[0].num_samples(waiting.key), 0U);
}

TEST_F(EngineCoreTest, AbortBetweenSamples) {
  config_.scheduler.max_num_seqs = 2;
  RequestInput input = endless(10, 4);
  input.num_samples = 5;
  core().submit(input);
  while (!engine().sample(input.key, 0).finished()) ASSERT_TRUE(engine().step());
  EXPECT_FALSE(engine().sample(input.key, 4).finished());
  core().abort(input.key);
  engine().step();
  engine().expect_idle();
  EXPECT_FALSE(engine().sample(input.key, 4).finished());
  run(endless(10, 4));
}

TEST_F(EngineCoreTest, AbortWhileSamplesStandAsideForThePrompt) {
  config_.scheduler.max_chunk_tokens = 4;
  RequestInput input = endless(30, 4);
  input.num_samples = 3;
  submit_and_count(2, input);
  EXPECT_EQ(stats().num_waiting, 2);
  core().abort(input.key);
  engine().step();
  engine().expect_idle();
}

TEST_F(EngineCoreTest, AbortIsSeenInTheStatsThoughNothingRuns) {
  const RequestInput input = endless(30, 50);
  submit_and_count(2, input);
  core().abort(input.key);
  EXPECT_TRUE(core().begin_step().empty());
  const auto message = core().take_outputs(0);
  ASSERT_TRUE(message.has_value());
  EXPECT_TRUE(read_message(*message).outputs.empty());
  EXPECT_EQ(read_message(*message).stats.kv_used_blocks, 0);
  EXPECT_FALSE(core().take_outputs(0).has_value());
}

// --- failures ----------------------------------------------------------------------------------

// WRK-03, KVA-03
TEST_F(EngineCoreTest, FailedStepEndsItsOwnRequestsOnly) {
  config_.scheduler.max_num_seqs = 2;
  const RequestInput first = endless(5, 20, 1), second = endless(5, 20, 2);
  const RequestInput waiting = endless(5, 20, 3);
  for (const RequestInput& input : {first, second, waiting}) core().submit(input);
  engine().worker.fails = [](const PlanView& plan) {
    return plan.step() == 5 ? "out of memory \xF0\x9F" : "";
  };
  engine().run_until_idle();
  for (const RequestInput& input : {first, second}) {
    const Sample& sample = engine().sample(input.key);
    EXPECT_EQ(sample.finish_reason, "error");
    EXPECT_EQ(sample.message, "out of memory " + kFffd);
    EXPECT_EQ(sample.tokens.size(), 4U);
    EXPECT_TRUE(engine().solo(input).text.starts_with(sample.text));
  }
  engine().expect_solo(waiting);
}

TEST_F(EngineCoreTest, StepMayFailWithoutAWord) {
  const RequestInput input = endless(5, 20);
  core().submit(input);
  ASSERT_FALSE(core().begin_step().empty());
  core().fail_step("");
  engine().run_until_idle();
  EXPECT_EQ(engine().sample(input.key).finish_reason, "error");
  EXPECT_NE(engine().sample(input.key).message, "");
}

TEST_F(EngineCoreTest, WhatIsNoResultFailsTheStepAndThrows) {
  const auto row = [](TokenId token) { return Sampled{token, {}}; };
  using Change = std::function<std::vector<int32_t>(uint64_t step)>;
  const std::vector<Change> results = {
      [](uint64_t) { return std::vector<int32_t>(); },
      [](uint64_t) { return std::vector<int32_t>(20, 0); },
      [&](uint64_t step) { return make_result(step - 1, {row(3)}, 2); },
      [&](uint64_t step) { return make_result(step, {}, 2); },
      [&](uint64_t step) { return make_result(step, {row(3), row(4)}, 2); },
      [&](uint64_t step) { return make_result(step, {row(3)}, 1); },
      [&](uint64_t step) { return make_result(step, {row(3)}, -1); },
      [&](uint64_t step) { return make_result(step, {row(-3)}, 2); },
      [&](uint64_t step) { return make_result(step - 1, {}, -1, "late"); },
      [&](uint64_t step) {
        auto words = make_result(step, {row(3)}, 2);
        words.pop_back();
        return words;
      },
  };
  for (const Change& result : results) {
    RequestInput input = endless(5, 20);
    input.sampling.row.num_logprobs = 2;
    core().submit(input);
    engine().step();
    const auto plan = core().begin_step();
    EXPECT_THROW(core().finish_step(result(PlanView(plan).step())), InternalError);
    core().check_invariants();
    engine().take_outputs();
    EXPECT_EQ(engine().sample(input.key).finish_reason, "error");
    EXPECT_NE(engine().sample(input.key).message, "");
    engine().expect_idle();
    run(endless(5, 4));  // and the engine goes on
  }
}

TEST_F(EngineCoreTest, StepsOutOfTurnThrowAndChangeNothing) {
  EXPECT_THROW(core().finish_step(make_result(0, {}, -1)), InternalError);
  EXPECT_THROW(core().fail_step("no"), InternalError);
  const RequestInput input = endless(5, 5);
  core().submit(input);
  const auto plan = core().begin_step();
  EXPECT_THROW(core().begin_step(), InternalError);
  core().finish_step(engine().worker.execute(plan));
  engine().run_until_idle();
  engine().expect_solo(input);
}

// --- clients -----------------------------------------------------------------------------------

TEST_F(EngineCoreTest, EachClientGetsItsOwn) {
  config_.num_clients = 3;
  std::vector<RequestInput> inputs;
  for (uint16_t client = 0; client < 3; ++client) {
    inputs.push_back(endless(5, 6 + client, client));
    inputs.back().key = make_key(client, 1);  // the same counter
    core().submit(inputs.back());
  }
  engine().run_until_idle();
  for (const RequestInput& input : inputs) engine().expect_solo(input);
}

TEST_F(EngineCoreTest, SlowClientGetsEverythingInOneMessage) {
  config_.num_clients = 2;
  const RequestInput slow = endless(5, 20, 1);
  RequestInput quick = endless(5, 20, 2);
  quick.key = make_key(1, 1);
  core().submit(slow);
  core().submit(quick);
  while (true) {
    const auto plan = core().begin_step();
    if (plan.empty()) break;
    core().finish_step(engine().worker.execute(plan));
    engine().clients[1].take(*core().take_outputs(1));
  }
  engine().take_outputs();
  EXPECT_EQ(engine().clients[0].num_messages, 1);
  engine().expect_solo(slow);
  engine().expect_solo(quick);
}

// --- nothing is kept ---------------------------------------------------------------------------

// KVA-01
TEST_F(EngineCoreTest, ThousandsOfRequestsOfAllKindsLeaveNothing) {
  config_.scheduler.max_num_waiting = 40;
  config_.cache.num_blocks = 40;
  engine().worker.fails = [](const PlanView& plan) {
    return plan.step() % 97 == 0 ? "now and then" : "";
  };
  int32_t num_ends[4] = {};
  std::vector<RequestInput> inputs;
  for (int32_t i = 0; i < 5000; ++i) {
    RequestInput input = request(prompt(1 + i % 23, i % 11), 1 + i % 13);
    input.sampling.row.seed_low = static_cast<uint32_t>(i);
    input.num_samples = i % 6 == 0 ? 4 : 1;
    if (i % 5 == 0) input.stops = {"a", "\xC3\xA9"};
    if (i % 17 == 0) input.prompt = script({3, -1});
    if (i % 31 == 0) input.prompt.clear();
    core().submit(input);
    inputs.push_back(input);
    if (i % 7 == 0) core().abort(inputs[inputs.size() * 9 / 10].key);
    engine().step();
    if (i % 3 == 0) engine().step();
    if (HasFailure()) return;
  }
  engine().run_until_idle();
  for (const RequestInput& input : inputs) {
    for (int32_t i = 0; i < input.num_samples; ++i) {
      const std::string& reason = engine().sample(input.key, i).finish_reason;
      num_ends[0] += reason == "stop";
      num_ends[1] += reason == "length";
      num_ends[2] += reason == "error";
      num_ends[3] += reason == "queue_full" || reason == "refused";
    }
  }
  for (const int32_t count : num_ends) EXPECT_GT(count, 50);
  run(endless(40, 40));  // the pool is whole
}

// --- prompts' own numbers ------------------------------------------------------------------------

TEST_F(EngineCoreTest, PromptLogprobsComeOnceWithTheFirstOutputHoweverThePromptIsCut) {
  config_.scheduler.max_chunk_tokens = 5;
  RequestInput input = endless(23, 3);
  input.num_samples = 2;
  input.num_prompt_logprobs = 2;
  run(input);
  EXPECT_EQ(engine().sample(input.key, 0).prompt_logprobs.size(), 22u);
  EXPECT_TRUE(engine().sample(input.key, 1).prompt_logprobs.empty());
  RequestInput later = endless(23, 0);
  later.num_prompt_logprobs = 0;
  later.prompt_logprobs_start = 21;
  run(later);
  EXPECT_EQ(engine().sample(later.key).prompt_logprobs.size(), 2u);
  EXPECT_EQ(engine().sample(later.key).finish_reason, "length");
}

TEST_F(EngineCoreTest, NumbersThatAreNotFiniteEndTheirRequestAlone) {
  RequestInput scored = endless(4, 5);
  scored.num_prompt_logprobs = 0;
  RequestInput pooled = endless(4, 0, 2);
  pooled.pooling = Pooling::kMean;
  RequestInput other = endless(4, 2, 3);
  for (const RequestInput& input : {scored, pooled, other}) core().submit(input);
  ASSERT_TRUE(engine().begin_step());
  engine().worker.execute(engine().plans.front());
  std::vector<Logprobs> logprobs(3, {.logprob = -1, .rank = 1, .top_ids = {}, .top_logprobs = {}});
  logprobs[1].rank = 0;
  core().finish_step(make_result(1, {{.token = 3, .logprobs = {}}, {.token = 4, .logprobs = {}}},
                                 -1, "", logprobs, 0, {NAN}));
  engine().plans.clear();
  engine().take_outputs();
  EXPECT_EQ(engine().sample(scored.key).finish_reason, "error");
  EXPECT_NE(engine().sample(scored.key).message.find("score"), std::string::npos);
  EXPECT_EQ(engine().sample(pooled.key).finish_reason, "error");
  EXPECT_EQ(engine().sample(other.key).tokens, std::vector<TokenId>{4});
  engine().run_until_idle();
  EXPECT_EQ(engine().sample(other.key).finish_reason, "length");
}

TEST_F(EngineCoreTest, AResultWithoutTheScoresOrVectorsAskedForIsNoResult) {
  for (const bool is_vector : {false, true}) {
    RequestInput input = endless(4, 0);
    if (is_vector) {
      input.pooling = Pooling::kLast;
    } else {
      input.num_prompt_logprobs = 0;
    }
    core().submit(input);
    ASSERT_TRUE(engine().begin_step());
    engine().plans.clear();
    const uint64_t step = is_vector ? 2 : 1;
    EXPECT_THROW(core().finish_step(make_result(step, {}, -1)), InternalError);
    engine().take_outputs();
    EXPECT_EQ(engine().sample(input.key).finish_reason, "error");
  }
}

}  // namespace
}  // namespace vllm_lite::testing
