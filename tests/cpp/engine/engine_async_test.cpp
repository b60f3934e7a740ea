// Asynchronous scheduling: what ends, fails or is aborted while the next step is in flight.
#include "engine_fixture.h"

namespace vllm_lite::testing {
namespace {

struct EngineAsync : EngineTest {
  EngineAsync() { config_.async_scheduling = true; }

  // Leaves two plans on their way.
  void begin_two(const std::vector<RequestInput>& inputs) {
    for (const RequestInput& input : inputs) core().submit(input);
    ASSERT_TRUE(engine().begin_step());
    ASSERT_TRUE(engine().begin_step());
  }
  const Sample& sample(const RequestInput& input, int32_t index = 0) {
    engine().take_outputs();
    return engine().sample(input.key, index);
  }
};

TEST_F(EngineAsync, NoMoreThanTwoPlansAreOut) {
  begin_two({endless(5, 20)});
  EXPECT_THROW(core().begin_step(), InternalError);
  engine().run_until_idle();
}

TEST_F(EngineAsync, EveryEndIsAtItsVeryToken) {
  const RequestInput eos = scripted({3, kEos, 4, 5});
  RequestInput string = scripted({3, 18, 19, 4, 5});
  string.stops = {"stop"};
  RequestInput minimum = scripted({kEos, 17, 17, 4, 17});
  minimum.stops = {"stop"};
  minimum.min_tokens = 3;
  minimum.sampling.stop_ids.clear();
  const RequestInput length = endless(5, 1);
  for (const RequestInput& input : {eos, string, minimum, length}) core().submit(input);
  engine().run_until_idle();
  for (const RequestInput& input : {eos, string, minimum, length}) engine().expect_solo(input);
  EXPECT_EQ(sample(eos).tokens.size(), 2U);
  EXPECT_EQ(sample(string).tokens.size(), 3U);
  EXPECT_EQ(sample(minimum).tokens.size(), 3U);
}

TEST_F(EngineAsync, AbortedRequestGivesNoMoreThoughItsStepsAreInFlight) {
  const RequestInput aborted = endless(30, 50, 1), other = endless(5, 20, 2);
  begin_two({aborted, other});
  engine().finish_step();
  core().abort(aborted.key);
  ASSERT_TRUE(engine().begin_step());
  EXPECT_LE(core().stats().kv_used_blocks, 3);
  EXPECT_EQ(core().stats().num_running, 1);
  engine().run_until_idle();
  EXPECT_EQ(sample(aborted).tokens.size(), 1U);
  engine().expect_solo(other);
}

TEST_F(EngineAsync, KeyMayBeUsedAgainWhileAStepOfItsFormerRequestIsInFlight) {
  const RequestInput input = endless(5, 6);
  core().submit(input);
  ASSERT_TRUE(engine().begin_step());
  core().abort(input.key);
  core().submit(input);
  ASSERT_TRUE(engine().begin_step());
  engine().run_until_idle();
  engine().expect_solo(input);
}

TEST_F(EngineAsync, FailedStepEndsThoseOfTheNextAsWellAndNobodyElse) {
  config_.scheduler.max_num_seqs = 3;
  const RequestInput first = endless(5, 20, 1), joined = endless(5, 20, 2);
  RequestInput waiting = endless(5, 20, 3);
  waiting.num_samples = 2;
  engine().worker.fails = [](const PlanView& plan) { return plan.step() == 2 ? "no" : ""; };
  begin_two({first});
  engine().finish_step();
  core().submit(joined);  // only in the third step
  ASSERT_TRUE(engine().begin_step());
  engine().finish_step();
  for (const RequestInput& input : {first, joined}) {
    EXPECT_EQ(sample(input).finish_reason, "error");
    EXPECT_EQ(sample(input).message, "no");
  }
  EXPECT_EQ(core().num_outstanding(), 1);
  core().submit(waiting);
  ASSERT_TRUE(engine().begin_step());  // before the third step's result, which is dropped
  engine().run_until_idle();
  engine().expect_solo(waiting);
  EXPECT_EQ(sample(first).tokens.size(), 1U);
  EXPECT_TRUE(sample(joined).tokens.empty());
}

TEST_F(EngineAsync, StepThatFailsAfterAnotherFailedIsDropped) {
  engine().worker.fails = [](const PlanView&) { return "no"; };
  const RequestInput input = endless(5, 20);
  begin_two({input});
  engine().finish_step();
  EXPECT_EQ(sample(input).message, "no");
  engine().finish_step();
  engine().expect_idle();
  EXPECT_FALSE(core().has_work());
  engine().worker.fails = {};
  run(endless(5, 4));
}

TEST_F(EngineAsync, FailStepTakesBothBackAndExpectsNoResult) {
  const RequestInput input = endless(5, 20);
  begin_two({input});
  core().fail_step("interrupted");
  core().check_invariants();
  EXPECT_EQ(core().num_outstanding(), 0);
  EXPECT_EQ(sample(input).message, "interrupted");
  engine().plans.clear();
  EXPECT_THROW(core().finish_step(make_result(2, {}, -1)), InternalError);
  run(endless(5, 4));
}

TEST_F(EngineAsync, ResultsOutOfOrderFailBothSteps) {
  const RequestInput input = endless(5, 20);
  begin_two({input});
  std::swap(engine().plans.front(), engine().plans.back());
  EXPECT_THROW(engine().finish_step(), InternalError);
  core().check_invariants();
  EXPECT_EQ(sample(input).finish_reason, "error");
  EXPECT_EQ(core().num_outstanding(), 0);
}

TEST_F(EngineAsync, FailedRowEndsAlone) {
  const RequestInput broken = scripted({3, -1, 4}), other = endless(9, 8);
  begin_two({broken, other});
  engine().run_until_idle();
  engine().expect_solo(broken);
  engine().expect_solo(other);
}

}  // namespace
}  // namespace vllm_lite::testing
