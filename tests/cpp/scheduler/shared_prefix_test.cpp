// Requests that come together with the same beginning: it is computed once.

#include <tuple>

#include "scheduler_fixture.h"

namespace vllm_lite {
namespace {

class SharedPrefixTest : public SchedulerTest {
 protected:
  SharedPrefixTest() {
    cache_config_.enable_prefix_caching = true;
    config_.min_awaited_tokens = 4;
  }
  // The prompt begins with `common` tokens of the text that `first` names; the rest is its own.
  Sequence* add_common(int32_t common, int32_t prompt, int32_t output = 4, TokenId first = 5) {
    Sequence* s = make(prompt, output, first);
    for (int32_t i = common; i < prompt; ++i) {
      s->tokens[static_cast<size_t>(i)] = 2000 + static_cast<TokenId>(sequences_.size());
    }
    EXPECT_EQ(scheduler().add(s), AddResult::kAdded);
    return s;
  }
  void commit_token(TokenId token = 7) {
    const auto num_samples = static_cast<size_t>(scheduler().step_in_flight(0).num_samples);
    scheduler().commit(std::vector<TokenId>(num_samples, token));
    scheduler().check_invariants();
  }
};

TEST_F(SharedPrefixTest, TheSecondWaitsForTheFirstAndHitsWhatTheyHaveInCommon) {
  Sequence* a = add_common(10, 18);
  Sequence* b = add_common(10, 18);
  const Step& first = step();
  EXPECT_EQ(tokens_of(first, a), 18);
  EXPECT_EQ(tokens_of(first, b), 0);
  EXPECT_EQ(scheduler().stats().num_waiting, 1);
  EXPECT_EQ(tokens_of(step(), b), 10);
  EXPECT_EQ(b->num_cached_tokens, 8);
  EXPECT_EQ(b->num_passed_over, 0);
  run_until_idle();
}

TEST_F(SharedPrefixTest, TooLittleInCommonIsNotWaitedForAndZeroMeansNever) {
  for (int32_t min_awaited : {12, 0}) {
    config_.min_awaited_tokens = min_awaited;
    scheduler_ = nullptr;
    add_common(8, 18);
    Sequence* b = add_common(8, 18);
    EXPECT_EQ(tokens_of(step(), b), 18);
    EXPECT_EQ(b->num_cached_tokens, 0);
  }
}

TEST_F(SharedPrefixTest, WithoutPrefixCachingNobodyWaits) {
  cache_config_.enable_prefix_caching = false;
  add_common(18, 18);
  Sequence* b = add_common(18, 18);
  EXPECT_EQ(tokens_of(step(), b), 18);
}

TEST_F(SharedPrefixTest, AnotherSaltIsAnotherPrefix) {
  add_common(18, 18);
  Sequence* b = make(18, 4, 5);
  b->salt = {0, 1};
  scheduler().add(b);
  EXPECT_EQ(tokens_of(step(), b), 18);
}

// A prompt in chunks: nothing is gained before its common part is done, and nothing lost.
TEST_F(SharedPrefixTest, TheSecondWaitsUntilTheChunksArePastTheCommonPartAndNoLonger) {
  cache_config_.num_blocks = 32;
  config_.max_chunk_tokens = 6;
  Sequence* a = add_common(16, 30);
  Sequence* b = add_common(16, 30);
  Sequence* alone = add(30, 4);
  for (int32_t end : {6, 12, 18}) {
    const Step& chunk = step();
    EXPECT_EQ(a->num_computed, end);
    EXPECT_EQ(tokens_of(chunk, b), 0);
    EXPECT_EQ(tokens_of(chunk, alone), 6);
  }
  EXPECT_EQ(tokens_of(step(), b), 6);
  EXPECT_EQ(b->num_cached_tokens, 16);
  EXPECT_EQ(a->num_computed, 24);
}

// Those between the two in priority would get what the less urgent one leaves of the budget, and
// the most urgent one would wait for all of them.
TEST_F(SharedPrefixTest, AnUrgentSequenceDoesNotWaitForALessUrgentOne) {
  cache_config_.num_blocks = 64;
  config_.policy = SchedulingPolicy::kPriority;
  config_.max_chunk_tokens = 6;
  config_.max_num_batched_tokens = 14;
  Sequence* background = make(30, 4, 5);
  background->priority = 10;
  scheduler().add(background);
  EXPECT_EQ(tokens_of(step(), background), 6);
  Sequence* urgent = make(30, 4, 5);
  Sequence* between = make(30, 4, 600);
  between->priority = 5;
  scheduler().add(urgent);
  scheduler().add(between);
  EXPECT_EQ(tokens_of(step(), urgent), 6);
  run_until_idle();
  EXPECT_EQ(urgent->num_output_tokens(), 4);
}

TEST_F(SharedPrefixTest, AStepInFlightIsWaitedForAsWell) {
  Sequence* a = add_common(16, 18);
  plan();
  Sequence* b = add_common(16, 18);
  EXPECT_EQ(tokens_of(plan(), b), 0);
  commit_token();
  EXPECT_EQ(tokens_of(plan(), b), 2);
  EXPECT_EQ(b->num_cached_tokens, 16);
  EXPECT_EQ(a->num_output_tokens(), 1);
}

// The sequences that are held back neither use up look_past nor come out of the queue's order.
TEST_F(SharedPrefixTest, UnrelatedRequestsBehindManyThatWaitAreAdmitted) {
  cache_config_.num_blocks = 200;
  config_.max_num_seqs = 100;
  config_.max_num_waiting = 100;
  config_.max_num_batched_tokens = 100;
  config_.max_model_len = 100;
  config_.look_past = 0;
  Sequence* leader = add_common(16, 20);
  std::vector<Sequence*> waiting;
  for (int32_t i = 0; i < 63; ++i) waiting.push_back(add_common(16, 20));
  Sequence* unrelated = add(20, 4);
  const Step& first = step();
  EXPECT_EQ(tokens_of(first, leader), 20);
  EXPECT_EQ(tokens_of(first, unrelated), 20);
  EXPECT_EQ(first.sequences.size(), 2u);
  const Step& second = step();  // 2 decodes; 4 tokens for each of the others
  ASSERT_EQ(second.sequences.size(), 27u);
  for (size_t i = 0; i < 25; ++i) {
    EXPECT_EQ(tokens_of(second, waiting[i]), i < 24 ? 4 : 2);
    EXPECT_EQ(waiting[i]->num_cached_tokens, 16);
  }
  run_until_idle();
}

TEST_F(SharedPrefixTest, LookPastIsForThoseThatDoNotFitAlone) {
  cache_config_.num_blocks = 20;
  config_.look_past = 1;
  config_.max_num_seqs = 8;
  Sequence* large = add(60, 4);  // takes all but five blocks
  step();
  Sequence* blocked = add(40, 2);
  Sequence* leader = add_common(8, 9);
  Sequence* held = add_common(8, 9);
  Sequence* behind = add(2, 2);
  const Step& next = step();
  EXPECT_EQ(tokens_of(next, leader), 9);
  EXPECT_EQ(tokens_of(next, held), 0);
  EXPECT_EQ(tokens_of(next, behind), 0);  // the one that look_past allows was the leader
  EXPECT_EQ(blocked->num_passed_over, 1);
  EXPECT_EQ(held->num_passed_over, 0);
  scheduler().finish(large);
  run_until_idle();
}

TEST_F(SharedPrefixTest, WhenTheFirstIsAbortedTheSecondGoesOnByItselfAndTheOthersWaitForIt) {
  for (bool in_flight : {false, true}) {
    scheduler_ = nullptr;
    config_.max_chunk_tokens = 8;
    Sequence* a = add_common(16, 18);
    Sequence* b = add_common(16, 18);
    Sequence* c = add_common(16, 18);
    const Step& first = plan();
    if (!in_flight) commit(first);
    scheduler().finish(a);
    const Step& next = plan();
    EXPECT_EQ(tokens_of(next, b), 8);
    EXPECT_EQ(tokens_of(next, c), 0);
    EXPECT_EQ(b->num_cached_tokens, in_flight ? 0 : 8);
    if (in_flight) commit_token();
    commit_token();
    run_until_idle();
    EXPECT_EQ(c->num_cached_tokens, 16);
  }
}

TEST_F(SharedPrefixTest, AFailedRowIsNotWaitedFor) {
  Sequence* a = add_common(16, 18);
  Sequence* b = add_common(16, 18);
  plan();
  commit_token(kNoToken);
  scheduler().finish(a);
  EXPECT_EQ(tokens_of(plan(), b), 18);
  EXPECT_EQ(b->num_cached_tokens, 0);
}

TEST_F(SharedPrefixTest, ACancelledStepStartsAnew) {
  Sequence* a = add_common(16, 18);
  Sequence* b = add_common(16, 18);
  plan();
  plan();
  scheduler().cancel_steps();
  scheduler().check_invariants();
  const Step& again = step();
  EXPECT_EQ(tokens_of(again, a), 18);
  EXPECT_EQ(tokens_of(again, b), 0);
  scheduler().recompute_all();
  const Step& anew = step();
  EXPECT_EQ(tokens_of(anew, a), 19);
  EXPECT_EQ(tokens_of(anew, b), 0);
  run_until_idle();
  EXPECT_EQ(b->num_cached_tokens, 16);
}

TEST_F(SharedPrefixTest, WhenTheFirstIsPreemptedTheSecondIsHeldBackByNobody) {
  config_.policy = SchedulingPolicy::kPriority;
  config_.max_chunk_tokens = 2;
  Sequence* old = make(24, 30);
  old->priority = -1;
  scheduler().add(old);
  while (old->num_computed < 24) step();  // a decode with six blocks
  Sequence* a = make(32, 2, 5);           // eight blocks
  a->priority = 1;
  scheduler().add(a);
  Sequence* b = make(32, 2, 5);
  b->priority = 0;
  step();
  scheduler().add(b);
  int32_t num_held = 0;
  for (int32_t i = 0; a->num_preemptions == 0; ++i) {
    ASSERT_LT(i, 30);
    num_held += b->state == SequenceState::kWaiting;
    step();
  }
  EXPECT_GT(num_held, 0);
  run_until_idle();
  EXPECT_EQ(b->num_output_tokens(), 2);
  EXPECT_EQ(a->num_output_tokens(), 2);
}

// A more urgent request waits for a less urgent one, which computes as much in each step as the
// urgent one could by itself, and comes first afterwards.
TEST_F(SharedPrefixTest, PriorityOrdersThoseThatWaited) {
  config_.policy = SchedulingPolicy::kPriority;
  config_.max_num_batched_tokens = 16;
  config_.max_num_seqs = 8;
  Sequence* a = add_common(12, 14);
  a->priority = 0;
  step();
  std::vector<Sequence*> all;
  for (int32_t priority : {2, 1, 0}) {
    Sequence* s = make(20, 4, 6);
    s->priority = priority;
    all.push_back(s);
    scheduler().add(s);
  }
  EXPECT_EQ(tokens_of(step(), all[2]), 15);
  const Step& next = step();
  EXPECT_EQ(tokens_of(next, all[2]), 5);
  EXPECT_EQ(tokens_of(next, all[1]), 0);  // the last common block is computed in this step
  const Step& then = step();
  EXPECT_EQ(tokens_of(then, all[1]), 4);
  EXPECT_EQ(tokens_of(then, all[0]), 4);
  run_until_idle();
}

// n > 1: the samples of the second request stand aside for its first one, which waits itself.
TEST_F(SharedPrefixTest, SamplesOfARequestThatWaitsForkItsPromptInTheEnd) {
  cache_config_.num_blocks = 64;
  config_.max_num_seqs = 8;
  Sequence* a = add_common(18, 18);
  Sequence* b = add_common(18, 18);
  Sequence* sample = add_fork(b);
  const Step& first = step();
  EXPECT_EQ(first.num_tokens, 18);
  EXPECT_EQ(tokens_of(first, a), 18);
  EXPECT_EQ(tokens_of(step(), b), 2);
  const Step& third = step();
  EXPECT_EQ(tokens_of(third, sample), 1);
  EXPECT_EQ(third.copies.size(), 1u);
  run_until_idle();
}

// Of 64 requests with 1,024 tokens in common and 32 of their own, in one step or many.
struct ManyRequests : SchedulerTest, testing::WithParamInterface<std::tuple<int32_t, int32_t>> {};

TEST_P(ManyRequests, ComputeTheCommonPromptOnce) {
  const auto [budget, max_in_flight] = GetParam();
  cache_config_ = {.num_blocks = 1024};
  config_.max_num_seqs = 64;
  config_.max_num_batched_tokens = budget;
  config_.max_model_len = 2048;
  std::vector<Sequence*> all;
  for (int32_t i = 0; i < 64; ++i) {
    all.push_back(make(1056, 8, 5));
    for (size_t j = 1024; j < 1056; ++j) all.back()->tokens[j] = 2000 + i;
    ASSERT_EQ(scheduler().add(all.back()), AddResult::kAdded);
  }
  int32_t num_prompt_tokens = 0;
  int32_t num_steps = 0;
  while (scheduler().has_work()) {
    ASSERT_LT(++num_steps, 100);
    const Step& step = plan();
    for (const ScheduledSequence& part : step.sequences) {
      const int32_t left = part.sequence->num_prompt_tokens - part.first_token;
      num_prompt_tokens += std::clamp(left, 0, part.num_tokens);
    }
    if (scheduler().num_in_flight() == max_in_flight || step.empty()) {
      commit(scheduler().step_in_flight(0));
    }
  }
  EXPECT_EQ(num_prompt_tokens, 1024 + 64 * 32);
  EXPECT_EQ(scheduler().stats().num_preemptions, 0);
  for (const Sequence* s : all) EXPECT_EQ(s->num_cached_tokens, s == all[0] ? 0 : 1024);
}

INSTANTIATE_TEST_SUITE_P(Budgets, ManyRequests,
                         testing::Combine(testing::Values(512, 2048, 8192), testing::Values(1, 2)));

}  // namespace
}  // namespace vllm_lite
