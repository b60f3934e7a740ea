// What the scheduler takes in, refuses, and lets run in which order.

#include "scheduler_fixture.h"

namespace vllm_lite {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// LEN-03
TEST_F(SchedulerTest, PoolTooSmallForTheModelLengthIsRefusedAtStartWithTheLargestThatFits) {
  config_.max_model_len = 8192;
  cache_config_.num_blocks = 100;
  const std::string error = error_of([this] { scheduler(); });
  EXPECT_TRUE(contains(error, "max_model_len is 8192")) << error;
  EXPECT_TRUE(contains(error, "100 blocks")) << error;
  EXPECT_TRUE(contains(error, "at most 400")) << error;
  config_.max_model_len = 400;
  EXPECT_NO_THROW(scheduler());
}

TEST_F(SchedulerTest, LimitsBelowTheirMinimumAreRefusedByName) {
  const auto refuses = [this](int32_t SchedulerConfig::* field, int32_t value, const char* name) {
    SchedulerConfig config = config_;
    config.*field = value;
    KvCacheManager cache(cache_config_);
    const std::string error = error_of([&] { Scheduler(config, cache); });
    EXPECT_TRUE(contains(error, name)) << error;
  };
  refuses(&SchedulerConfig::max_num_seqs, 0, "max_num_seqs is 0");
  refuses(&SchedulerConfig::max_num_batched_tokens, 0, "max_num_batched_tokens is 0");
  refuses(&SchedulerConfig::max_model_len, 0, "max_model_len is 0");
  refuses(&SchedulerConfig::max_num_waiting, 0, "max_num_waiting is 0");
  refuses(&SchedulerConfig::max_chunk_tokens, -1, "max_chunk_tokens is -1");
  refuses(&SchedulerConfig::look_past, -1, "look_past is -1");
  refuses(&SchedulerConfig::max_passed_over, -1, "max_passed_over is -1");
  refuses(&SchedulerConfig::min_awaited_tokens, -1, "min_awaited_tokens is -1");
}

// LEN-01
TEST_F(SchedulerTest, PromptOfOneLessThanTheModelLengthGivesOneToken) {
  Sequence* longest = add(63, 1);
  run_until_idle();
  EXPECT_EQ(longest->num_output_tokens(), 1);
}

TEST_F(SchedulerTest, SequenceThatCanNeverRunIsRefusedWithTheNumbersAndLeftAlone) {
  Sequence* running = add(8, 4);
  step();
  for (int32_t prompt : {64, 65, 10000}) {
    Sequence* s = make(prompt, 1);
    const std::string error = error_of([&] { scheduler().add(s); });
    EXPECT_TRUE(contains(error, std::to_string(prompt) + " tokens")) << error;
    EXPECT_TRUE(contains(error, "max_model_len, which is 64")) << error;
    EXPECT_EQ(s->state, SequenceState::kNew);
  }
  const std::string over = error_of([&] { scheduler().add(make(60, 5)); });
  EXPECT_TRUE(contains(over, "65 tokens in all")) << over;
  EXPECT_TRUE(contains(error_of([&] { scheduler().add(make(8, -1)); }), "8 tokens given"));
  EXPECT_TRUE(contains(error_of([&] { scheduler().add(make(0, 5)); }), "no tokens"));
  EXPECT_EQ(scheduler().stats().num_waiting, 0);
  run_until_idle();
  EXPECT_EQ(running->num_output_tokens(), 4);
}

// LEN-05
TEST_F(SchedulerTest, OutputFillsTheModelLengthAndNeverWritesPastTheBlockTable) {
  Sequence* s = add(58, 6);
  while (scheduler().has_work()) {
    const Step& step = plan();
    EXPECT_LE(s->block_table.blocks.size(), 16u);
    commit(step);
  }
  EXPECT_EQ(s->num_output_tokens(), 6);
}

TEST_F(SchedulerTest, SequenceAtItsLimitThatNobodyFinishedIsAnErrorBeforeAnythingChanges) {
  add(4, 1);
  const Step& first = plan();
  const TokenId token = 3;
  scheduler().commit({&token, static_cast<size_t>(first.num_samples)});
  EXPECT_THROW(scheduler().plan(), InternalError);
  scheduler().check_invariants();
}

TEST_F(SchedulerTest, QueueIsBoundedAndAFullOneLeavesTheSequenceAlone) {
  config_.max_num_waiting = 2;
  Sequence* first = add(4, 4);
  add(4, 4);
  Sequence* third = make(4, 4);
  EXPECT_EQ(scheduler().add(third), AddResult::kQueueFull);
  EXPECT_EQ(third->state, SequenceState::kNew);
  scheduler().finish(first);
  EXPECT_EQ(scheduler().add(third), AddResult::kAdded);
}

TEST_F(SchedulerTest, SamplesThatStandAsideCountForTheQueueBound) {
  config_.max_num_waiting = 2;
  config_.max_num_batched_tokens = 4;
  Sequence* parent = add(8, 4);
  add_fork(parent);
  step();  // half of the prompt; the sample stands aside
  EXPECT_EQ(scheduler().stats().num_waiting, 1);
  add(4, 4);
  EXPECT_EQ(scheduler().add(make(4, 4)), AddResult::kQueueFull);
}

TEST_F(SchedulerTest, FirstComeIgnoresPriority) {
  config_.max_num_seqs = 1;
  Sequence* a = add(4, 1);
  Sequence* b = make(4, 1);
  b->priority = -5;
  scheduler().add(b);
  EXPECT_EQ(tokens_of(step(), a), 4);
  EXPECT_EQ(tokens_of(step(), b), 4);
}

TEST_F(SchedulerTest, PriorityThenArrivalOrdersAdmission) {
  config_.policy = SchedulingPolicy::kPriority;
  config_.max_num_seqs = 1;
  std::vector<Sequence*> added;
  for (int32_t priority : {2, 0, 1, 0, -1, 2}) {
    added.push_back(make(4, 1));
    added.back()->priority = priority;
    scheduler().add(added.back());
  }
  for (size_t expected : {4, 1, 3, 2, 0, 5}) EXPECT_EQ(tokens_of(step(), added[expected]), 4);
}

TEST_F(SchedulerTest, AdmissionNeedsBlocksForTheWholePromptThoughChunksCutTheComputing) {
  config_.max_chunk_tokens = 4;
  Sequence* s = add(40, 2);
  EXPECT_EQ(tokens_of(step(), s), 4);
  EXPECT_EQ(cache_->num_used_blocks(), 10);
  Sequence* too_large = add(30, 2);  // 8 blocks of the 6 left
  EXPECT_EQ(tokens_of(step(), too_large), 0);
  EXPECT_EQ(cache_->num_used_blocks(), 10);  // all or nothing
  EXPECT_TRUE(too_large->block_table.blocks.empty());
  run_until_idle();
}

TEST_F(SchedulerTest, BudgetIsSharedByDecodesFirstThenChunksInOrder) {
  config_.max_num_batched_tokens = 10;
  Sequence* a = add(4, 9);
  step();
  Sequence* b = add(20, 9);
  Sequence* c = add(4, 9);
  const Step& mixed = step();
  EXPECT_EQ(tokens_of(mixed, a), 1);
  EXPECT_EQ(tokens_of(mixed, b), 9);
  EXPECT_EQ(tokens_of(mixed, c), 0);
  EXPECT_EQ(mixed.num_tokens, 10);
  EXPECT_EQ(mixed.num_samples, 1);
}

TEST_F(SchedulerTest, ChunksOfAnOldSequenceLeaveAYoungerDecodeItsToken) {
  config_.max_num_batched_tokens = 8;
  config_.max_chunk_tokens = 6;
  Sequence* large = add(40, 2);
  Sequence* small = add(2, 12);
  step();
  for (int32_t i = 0; i < 5; ++i) EXPECT_EQ(tokens_of(step(), small), 1);
  EXPECT_GT(large->num_computed, 30);
}

// SCH-01: a running stream and a flood of prompts.
TEST_F(SchedulerTest, SteadyFlowOfPromptsNeverStarvesARunningDecode) {
  cache_config_.num_blocks = 4096;
  config_.max_num_batched_tokens = 512;
  config_.max_model_len = 1024;
  config_.max_num_seqs = 32;
  config_.max_num_waiting = 1000;
  Sequence* stream = add(16, 300);
  step();
  std::vector<Sequence*> flood;
  for (int32_t i = 0; i < 200; ++i) {
    flood.push_back(add(500, 3));
    EXPECT_EQ(tokens_of(step(), stream), 1);
  }
  EXPECT_EQ(stream->num_output_tokens(), 201);
  EXPECT_EQ(flood.front()->state, SequenceState::kFinished);  // nor are the prompts starved
  EXPECT_GE(std::count_if(flood.begin(), flood.end(),
                          [](auto* s) { return s->state == SequenceState::kFinished; }),
            150);
}

// SCH-03: a large request does not block small ones, nor do they starve it.
TEST_F(SchedulerTest, LargeHeadIsPassedOverABoundedNumberOfTimes) {
  config_.max_passed_over = 3;
  config_.max_num_seqs = 8;
  add(24, 40);
  step();
  Sequence* large = add(44, 2);
  int32_t num_passed = 0;
  for (int32_t i = 0; i < 12; ++i) {
    Sequence* small = add(4, 2);
    num_passed += tokens_of(step(), small) > 0;
  }
  EXPECT_EQ(num_passed, 3);
  EXPECT_EQ(large->num_passed_over, 3);
  EXPECT_EQ(large->state, SequenceState::kWaiting);
  for (int32_t i = 0; large->state == SequenceState::kWaiting; ++i) {
    ASSERT_LT(i, 60);
    step();
  }
  EXPECT_EQ(large->num_passed_over, 0);
  run_until_idle();
}

TEST_F(SchedulerTest, LookPastTriesNoMoreThanItsNumber) {
  for (int32_t look_past : {2, 3}) {
    config_.look_past = look_past;
    scheduler_ = nullptr;
    add(36, 20);
    step();
    for (int32_t i = 0; i < 3; ++i) add(40, 2);  // the head and two of those that are tried
    Sequence* small = add(4, 2);
    EXPECT_EQ(tokens_of(step(), small), look_past == 3 ? 4 : 0);
  }
}

TEST_F(SchedulerTest, NoLookPastMeansStrictOrder) {
  config_.look_past = 0;
  add(36, 20);
  step();
  Sequence* large = add(40, 2);
  Sequence* small = add(4, 2);
  EXPECT_EQ(tokens_of(step(), small), 0);
  EXPECT_EQ(large->num_passed_over, 0);
}

TEST_F(SchedulerTest, AdmissionLeavesHeadroomForThoseRunningButNoneWhenNobodyRuns) {
  cache_config_.num_blocks = 32;  // headroom up to 2
  config_.max_num_seqs = 8;
  config_.max_model_len = 128;
  add(4, 40);
  add(4, 40);
  step();
  EXPECT_EQ(cache_->num_available_blocks(), 30);
  Sequence* tight = add(29 * 4, 2);  // after the next growth of both 28 are left
  Sequence* fits = add(24 * 4, 2);
  const Step& next = step();
  EXPECT_EQ(tokens_of(next, tight), 0);
  EXPECT_GT(tokens_of(next, fits), 0);
  scheduler().finish(fits);
  run_until_idle();
  EXPECT_EQ(tight->num_output_tokens(), 2);
  EXPECT_EQ(tight->num_preemptions, 0);
}

TEST_F(SchedulerTest, RunningSequencesNeverOutnumberTheBudget) {
  config_.max_num_batched_tokens = 2;
  std::vector<Sequence*> all;
  for (int32_t i = 0; i < 4; ++i) all.push_back(add(1, 5));
  for (int32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(step().sequences.size(), 2u);
    EXPECT_LE(scheduler().stats().num_running, 2);
  }
  run_until_idle();
}

// ABT-05: waiting sequences hold nothing, however often their admission was tried.
TEST_F(SchedulerTest, AbortOfAWaitingSequenceWithACachedPrefixLeaksNothing) {
  cache_config_.enable_prefix_caching = true;
  Sequence* first = make(24, 1, 5);
  scheduler().add(first);
  run_until_idle();
  add(41, 20);  // the pool is now full but for 5 blocks, which still hold most of the prefix
  step();
  const int32_t used = cache_->num_used_blocks();
  const int32_t available = cache_->num_available_blocks();
  Sequence* waiting = make(40, 1, 5);
  scheduler().add(waiting);
  step();
  ASSERT_EQ(waiting->state, SequenceState::kWaiting);
  EXPECT_EQ(waiting->num_cached_tokens, -1);
  scheduler().finish(waiting);
  scheduler().check_invariants();
  EXPECT_EQ(cache_->num_used_blocks(), used);
  EXPECT_EQ(cache_->num_available_blocks(), available);
  EXPECT_EQ(waiting->state, SequenceState::kFinished);
}

// KVA-01, and ends of every kind: own limit, abort before, in and after a step, failed row.
TEST_F(SchedulerTest, ThousandsOfShortRequestsLeaveThePoolAsItWas) {
  cache_config_.enable_prefix_caching = true;
  for (int32_t i = 0; i < 3000; ++i) {
    Sequence* s = make(1 + i % 30, 1 + i % 4, i % 11);
    ASSERT_EQ(scheduler().add(s), AddResult::kAdded);
    if (i % 5 == 0) add_fork(s);
    if (i % 7 == 0) scheduler().finish(s);
    const Step& step = scheduler().plan();
    if (step.empty()) continue;
    if (i % 3 == 0 && s->state == SequenceState::kRunning) scheduler().finish(s);
    std::vector<TokenId> sampled(static_cast<size_t>(step.num_samples), 9);
    if (i % 13 == 0 && !sampled.empty()) sampled[0] = kNoToken;
    scheduler().commit(sampled);
    for (const ScheduledSequence& part : step.sequences) {
      Sequence& t = *part.sequence;
      const bool failed = part.samples && t.num_computed < part.first_token + part.num_tokens;
      if (t.state == SequenceState::kRunning && (failed || t.num_tokens() == t.max_total_tokens)) {
        scheduler().finish(&t);
      }
    }
  }
  run_until_idle();
  scheduler().check_invariants();
  EXPECT_EQ(cache_->num_available_blocks(), cache_->num_blocks());
}

}  // namespace
}  // namespace vllm_lite
