// Running sequences: growth, preemption, rows, commit, cancel, forks, prefix publication.

#include "scheduler_fixture.h"

namespace vllm_lite {
namespace {

TEST_F(SchedulerTest, NumComputedAdvancesAtCommitAlone) {
  config_.max_chunk_tokens = 6;
  Sequence* s = add(10, 2);
  const Step& first = plan();
  EXPECT_EQ(first.num_samples, 0);
  EXPECT_EQ(s->num_computed, 0);
  commit(first);
  EXPECT_EQ(s->num_computed, 6);
  const Step& second = plan();
  EXPECT_EQ(second.sequences[0].first_token, 6);
  EXPECT_EQ(second.sequences[0].num_tokens, 4);
  EXPECT_TRUE(second.sequences[0].samples);
  commit(second, 42);
  EXPECT_EQ(s->num_computed, 10);
  EXPECT_EQ(s->tokens.back(), 42);
  EXPECT_EQ(s->num_tokens(), 11);
}

TEST_F(SchedulerTest, PreemptsTheLatestArrivalAndAdmitsNobodyInThatStep) {
  Sequence* a = add(28, 30);
  Sequence* b = add(28, 30);  // 7 blocks each of 16, full at once
  Sequence* waiting = nullptr;
  for (int32_t i = 0; i < 5; ++i) step();  // both have 8 blocks now and 32 tokens
  waiting = add(4, 2);
  const RowId row = b->row;
  const Step& preempting = plan();
  EXPECT_EQ(tokens_of(preempting, a), 1);
  EXPECT_EQ(tokens_of(preempting, b), 0);
  EXPECT_EQ(tokens_of(preempting, waiting), 0);
  EXPECT_EQ(freed(preempting), std::vector<RowId>{row});
  EXPECT_EQ(b->state, SequenceState::kWaiting);
  EXPECT_EQ(b->num_computed, 0);
  EXPECT_EQ(b->num_tokens(), 33);  // keeps what it has sampled
  EXPECT_EQ(b->num_preemptions, 1);
  EXPECT_EQ(scheduler().stats().num_preemptions, 1);
  commit(preempting);
  run_until_idle();
  EXPECT_EQ(a->num_preemptions, 0);
  EXPECT_EQ(b->num_output_tokens(), 30);
}

TEST_F(SchedulerTest, PreemptedSequenceComesBackInFrontOfLaterArrivals) {
  config_.look_past = 0;
  Sequence* a = add(28, 30);
  Sequence* b = add(28, 30);
  for (int32_t i = 0; i < 5; ++i) step();
  Sequence* later = add(4, 2);
  step();
  ASSERT_EQ(b->state, SequenceState::kWaiting);
  scheduler().finish(a);
  const Step& resumed = step();
  EXPECT_EQ(resumed.sequences[0].sequence, b);
  EXPECT_EQ(resumed.sequences[0].num_tokens, 33);  // all its tokens, in one chunk
  EXPECT_EQ(resumed.sequences[1].sequence, later);
}

TEST_F(SchedulerTest, PriorityPolicyPreemptsTheLeastUrgentThoughItCameFirst) {
  config_.policy = SchedulingPolicy::kPriority;
  Sequence* low = make(28, 30);
  low->priority = 1;
  scheduler().add(low);
  Sequence* high = add(28, 30);
  for (int32_t i = 0; i < 6; ++i) step();
  EXPECT_EQ(low->state, SequenceState::kWaiting);
  EXPECT_EQ(high->state, SequenceState::kRunning);
}

TEST_F(SchedulerTest, LastInOrderPreemptsItselfAndGivesItsBudgetBack) {
  Sequence* a = add(30, 30);
  Sequence* b = add(28, 30);
  for (int32_t i = 0; b->state != SequenceState::kWaiting; ++i) {
    ASSERT_LT(i, 20);
    const Step& next = step();
    int32_t sum = 0;
    for (const ScheduledSequence& part : next.sequences) sum += part.num_tokens;
    EXPECT_EQ(sum, next.num_tokens);
    EXPECT_EQ(tokens_of(next, a) > 0, true);
  }
  run_until_idle();
}

// SCH-05: six sequences that preempt each other all end with all their tokens.
TEST_F(SchedulerTest, TinyPoolPreemptsOftenAndEverySequenceStillGetsAllItsTokens) {
  config_.max_num_seqs = 6;
  config_.max_chunk_tokens = 5;
  std::vector<Sequence*> all;
  for (int32_t i = 0; i < 6; ++i) all.push_back(add(6 + i, 40));
  run_until_idle();
  for (Sequence* s : all) EXPECT_EQ(s->num_output_tokens(), 40);
  EXPECT_GE(scheduler().stats().num_preemptions, 6);
}

TEST_F(SchedulerTest, FreedRowIsReportedOnceAndMayBeGivenInTheSameStep) {
  config_.max_num_seqs = 1;
  Sequence* a = add(4, 1);
  const Step& first = step();
  EXPECT_TRUE(first.sequences[0].new_row);
  EXPECT_TRUE(first.freed_rows.empty());
  EXPECT_EQ(a->state, SequenceState::kFinished);
  EXPECT_TRUE(plan().empty());  // nothing to send: the freed row waits for a step that is
  Sequence* b = add(4, 2);
  const Step& second = plan();
  EXPECT_EQ(freed(second), std::vector<RowId>{0});
  EXPECT_TRUE(second.sequences[0].new_row);
  EXPECT_EQ(b->row, 0);
  commit(second);
  const Step& third = plan();
  EXPECT_TRUE(third.freed_rows.empty());
  EXPECT_FALSE(third.sequences[0].new_row);
}

TEST_F(SchedulerTest, AbortInFlightGivesBlocksAndRowBackAndGetsNothingAtCommit) {
  Sequence* a = add(8, 4);
  Sequence* b = add(8, 4);
  const Step& flying = plan();
  scheduler().finish(a);
  EXPECT_EQ(a->state, SequenceState::kFinished);
  EXPECT_TRUE(scheduler().in_flight(a));  // the step points to it
  EXPECT_EQ(cache_->num_used_blocks(), 2);
  EXPECT_EQ(a->row, -1);
  scheduler().check_invariants();
  commit(flying);
  EXPECT_FALSE(scheduler().in_flight(a));
  EXPECT_EQ(cache_->num_used_blocks(), 2);
  EXPECT_EQ(a->num_output_tokens(), 0);
  EXPECT_EQ(b->num_output_tokens(), 1);
  EXPECT_EQ(plan().freed_rows.size(), 1u);
}

TEST_F(SchedulerTest, CancelLeavesThoseAbortedInFlightAlone) {
  Sequence* a = add(12, 4);
  Sequence* b = add(12, 4);
  step();
  Sequence* fresh = add(12, 4);
  plan();
  scheduler().finish(b);
  scheduler().finish(fresh);
  scheduler().cancel_steps();
  scheduler().check_invariants();
  EXPECT_EQ(cache_->num_used_blocks(), 4);
  EXPECT_EQ(a->state, SequenceState::kRunning);
  EXPECT_EQ(b->row, -1);
  EXPECT_EQ(fresh->row, -1);
  EXPECT_EQ(plan().freed_rows.size(), 2u);
}

TEST_F(SchedulerTest, FailedRowKeepsNothingOfTheStep) {
  cache_config_.enable_prefix_caching = true;
  Sequence* s = make(9, 4, 5);
  scheduler().add(s);
  plan();
  const TokenId dropped = kNoToken;
  scheduler().commit({&dropped, 1});
  EXPECT_EQ(s->num_computed, 0);
  EXPECT_EQ(s->num_tokens(), 9);
  scheduler().check_invariants();
  scheduler().finish(s);
  Sequence* same = make(9, 4, 5);
  scheduler().add(same);
  plan();
  EXPECT_EQ(same->num_cached_tokens, 0);  // its rubbish was not published
}

TEST_F(SchedulerTest, CommitWantsExactlyOneTokenForEachSample) {
  add(4, 2);
  plan();
  EXPECT_THROW(scheduler().commit({}), InternalError);
  const std::vector<TokenId> two = {1, 2};
  EXPECT_THROW(scheduler().commit(two), InternalError);
  scheduler().commit({two.data(), 1});
  EXPECT_THROW(scheduler().commit({two.data(), 1}), InternalError);  // nothing in flight
  EXPECT_THROW(scheduler().cancel_steps(), InternalError);
}

TEST_F(SchedulerTest, CancelPutsTheAdmittedBackAndSaysRowsAndTablesAgain) {
  Sequence* old = add(4, 20);
  Sequence* gone = add(4, 1);
  step();  // `gone` ends and frees its row
  Sequence* fresh = add(4, 4);
  fresh->num_blocks_sent = 0;
  old->num_blocks_sent = 2;  // as a builder does in this step
  const RowId gone_row = 1;
  const Step& cancelled = plan();
  ASSERT_EQ(freed(cancelled), std::vector<RowId>{gone_row});
  ASSERT_EQ(fresh->row, gone_row);
  old->num_blocks_sent = 2;
  scheduler().cancel_steps();
  scheduler().check_invariants();
  EXPECT_EQ(old->num_computed, 4);
  EXPECT_EQ(old->num_blocks_sent, 1);  // entry 1, where token 4 goes, is sent again
  EXPECT_EQ(fresh->state, SequenceState::kWaiting);
  EXPECT_EQ(fresh->num_cached_tokens, -1);
  EXPECT_EQ(fresh->num_preemptions, 0);
  const Step& again = plan();
  EXPECT_EQ(freed(again), std::vector<RowId>{gone_row});  // once, though for two reasons
  EXPECT_TRUE(again.sequences[1].new_row);
  EXPECT_EQ(again.sequences[1].sequence, fresh);
  commit(again);
  run_until_idle();
  EXPECT_EQ(gone->num_output_tokens(), 1);
}

TEST_F(SchedulerTest, RecomputeAllStartsFromNothingAndLosesNoToken) {
  cache_config_.enable_prefix_caching = true;
  Sequence* a = add(9, 6);
  Sequence* b = add(9, 6);
  step();
  step();
  plan();
  scheduler().cancel_steps();
  scheduler().recompute_all();
  scheduler().check_invariants();
  EXPECT_EQ(cache_->num_used_blocks(), 0);
  const Step& again = plan();
  EXPECT_TRUE(again.freed_rows.empty());
  EXPECT_EQ(tokens_of(again, a), 11);
  EXPECT_EQ(tokens_of(again, b), 11);
  commit(again);
  run_until_idle();
  EXPECT_EQ(a->num_output_tokens(), 6);
}

// PFX-08: the second of two equal prompts must not use blocks that the first is only about to
// compute.
TEST_F(SchedulerTest, EqualPromptsInOneStepShareNothingYetAndLaterOnesDo) {
  cache_config_.enable_prefix_caching = true;
  Sequence* a = make(18, 2, 5);
  Sequence* b = make(18, 2, 5);
  b->tokens.back() = 99;
  scheduler().add(a);
  scheduler().add(b);
  const Step& first = plan();
  EXPECT_EQ(tokens_of(first, a), 18);
  EXPECT_EQ(tokens_of(first, b), 18);
  EXPECT_EQ(b->num_cached_tokens, 0);
  commit(first);
  Sequence* c = make(18, 2, 5);
  scheduler().add(c);
  EXPECT_EQ(tokens_of(plan(), c), 2);
  EXPECT_EQ(c->num_cached_tokens, 16);
}

TEST_F(SchedulerTest, OnlyWholeComputedBlocksOfAChunkedPromptAreShared) {
  cache_config_.enable_prefix_caching = true;
  config_.max_chunk_tokens = 6;
  Sequence* a = make(18, 2, 5);
  scheduler().add(a);
  step();
  Sequence* b = make(18, 2, 5);
  scheduler().add(b);
  plan();
  EXPECT_EQ(b->num_cached_tokens, 4);
}

TEST_F(SchedulerTest, ForkWaitsAsideUntilThePromptIsComputedThenComputesItsLastToken) {
  config_.max_chunk_tokens = 4;
  Sequence* parent = add(10, 4);
  Sequence* fork = add_fork(parent);
  Sequence* other = add(4, 2);
  const Step& first = step();
  EXPECT_EQ(tokens_of(first, fork), 0);
  EXPECT_EQ(tokens_of(first, other), 4);  // admitted past it
  EXPECT_EQ(fork->num_passed_over, 0);
  step();
  const Step& last_chunk = step();
  EXPECT_EQ(tokens_of(last_chunk, fork), 0);
  ASSERT_EQ(parent->num_computed, 10);
  const Step& forked = plan();
  EXPECT_EQ(tokens_of(forked, fork), 1);
  EXPECT_EQ(forked.sequences[1].first_token, 9);
  EXPECT_TRUE(forked.sequences[1].samples);
  ASSERT_EQ(forked.copies.size(), 1u);
  EXPECT_EQ(forked.copies[0].source, parent->block_table.blocks[2]);
  EXPECT_EQ(forked.copies[0].destination, fork->block_table.blocks[2]);
  EXPECT_EQ(fork->block_table.blocks[0], parent->block_table.blocks[0]);
  EXPECT_EQ(fork->fork_parent, nullptr);
  EXPECT_EQ(parent->forks, nullptr);
  EXPECT_EQ(fork->num_cached_tokens, 0);
  commit(forked);
  EXPECT_TRUE(plan().copies.empty());  // listed once
}

TEST_F(SchedulerTest, ForkAtABlockEdgeCopiesNothingAndTakesABlockForItsLastToken) {
  Sequence* parent = add(9, 4);
  Sequence* fork = add_fork(parent);
  step();
  const int32_t used = cache_->num_used_blocks();
  const Step& forked = plan();
  EXPECT_EQ(tokens_of(forked, fork), 1);
  EXPECT_TRUE(forked.copies.empty());
  EXPECT_EQ(cache_->num_used_blocks(), used + 1);
}

TEST_F(SchedulerTest, ForksComeInOrderInFrontOfLaterArrivals) {
  config_.max_num_seqs = 3;
  Sequence* parent = add(10, 8);
  Sequence* forks[] = {add_fork(parent), add_fork(parent), add_fork(parent)};
  add(4, 2);
  step();
  const Step& forked = step();
  EXPECT_EQ(forked.sequences[1].sequence->arrival, 4u);  // was admitted while they stood aside
  EXPECT_EQ(tokens_of(forked, forks[0]), 1);
  EXPECT_EQ(tokens_of(forked, forks[1]), 0);
  run_until_idle();
}

TEST_F(SchedulerTest, ForkOfAFinishedParentIsAdmittedAsAnyOther) {
  config_.max_chunk_tokens = 4;
  Sequence* parent = add(10, 4);
  Sequence* first = add_fork(parent);
  Sequence* second = add_fork(parent);
  step();
  EXPECT_FALSE(first->hook.linked());
  scheduler().finish(parent);
  sequences_.erase(sequences_.begin());  // nothing may look at it any more
  EXPECT_EQ(first->fork_parent, nullptr);
  EXPECT_EQ(second->fork_parent, nullptr);
  EXPECT_EQ(tokens_of(step(), first), 4);
  run_until_idle();
  EXPECT_EQ(second->num_output_tokens(), 4);
  Sequence* late = make(4, 2);
  late->fork_parent = first;  // finished, but alive
  scheduler().add(late);
  EXPECT_EQ(late->fork_parent, nullptr);
  run_until_idle();
}

TEST_F(SchedulerTest, AbortedForkLeavesItsParentsChain) {
  config_.max_chunk_tokens = 4;
  Sequence* parent = add(10, 4);
  Sequence* forks[] = {add_fork(parent), add_fork(parent), add_fork(parent)};
  step();
  for (Sequence* fork : {forks[1], forks[2], forks[0]}) {
    scheduler().finish(fork);
    scheduler().check_invariants();
  }
  EXPECT_EQ(parent->forks, nullptr);
  EXPECT_EQ(scheduler().stats().num_waiting, 0);
  run_until_idle();
}

TEST_F(SchedulerTest, ForkWithoutRoomForItsBlockWaitsAndChangesNothing) {
  cache_config_.num_blocks = 4;
  config_.max_model_len = 16;
  Sequence* parent = add(14, 2);
  Sequence* fork = add_fork(parent);
  step();
  const Step& full = plan();
  EXPECT_EQ(tokens_of(full, fork), 0);
  EXPECT_TRUE(full.copies.empty());
  EXPECT_TRUE(fork->block_table.blocks.empty());
  commit(full);
  run_until_idle();
  EXPECT_EQ(fork->num_output_tokens(), 2);
}

TEST_F(SchedulerTest, OneTokenPromptHasNothingToFork) {
  Sequence* parent = add(1, 4);
  Sequence* fork = add_fork(parent);
  step();
  const Step& forked = step();
  EXPECT_EQ(tokens_of(forked, fork), 1);
  EXPECT_EQ(fork->fork_parent, nullptr);
  run_until_idle();
}

TEST_F(SchedulerTest, ForkOfAParentThatLostItsPromptToTheWindowIsComputedWhole) {
  cache_config_.sliding_window = 6;
  config_.max_num_seqs = 2;
  Sequence* blocker = add(2, 10);
  Sequence* parent = add(12, 30);
  Sequence* fork = add_fork(parent);
  for (int32_t i = 0; i < 10; ++i) step();  // no row for the fork meanwhile
  ASSERT_EQ(blocker->state, SequenceState::kFinished);
  ASSERT_GT(parent->block_table.num_out_of_window, 2);
  const Step& admitted = step();
  EXPECT_EQ(tokens_of(admitted, fork), 12);
  EXPECT_TRUE(admitted.copies.empty());
  run_until_idle();
}

TEST_F(SchedulerTest, NoMoreThanTwoStepsAreInFlightNotCountingEmptyOnes) {
  EXPECT_TRUE(scheduler().plan().empty());
  EXPECT_TRUE(scheduler().plan().empty());
  add(4, 4);
  plan();
  plan();
  EXPECT_THROW(scheduler().plan(), InternalError);
}

// --- prompts' own numbers --------------------------------------------------------------------

TEST_F(SchedulerTest, PromptsWhoseHiddenStatesAreWantedTakeNoHitsBeyondTheFirst) {
  cache_config_.enable_prefix_caching = true;
  scheduler().add(make(20, 1, 5));
  run_until_idle();
  const auto cached = [&](int32_t num_prompt_logprobs, int32_t score_begin, Pooling pooling) {
    Sequence* s = make(21, pooling == Pooling::kNone ? 1 : 0, 5);
    s->num_prompt_logprobs = num_prompt_logprobs;
    s->score_begin = score_begin;
    s->pooling = pooling;
    scheduler().add(s);
    const Step step = plan();
    const int32_t num_cached = s->num_cached_tokens;
    EXPECT_EQ(step.num_scored,
              num_prompt_logprobs < 0 ? 0 : 20 - std::max(score_begin, num_cached));
    EXPECT_EQ(step.num_vectors, pooling != Pooling::kNone);
    EXPECT_EQ(step.num_samples, pooling == Pooling::kNone);
    scheduler().commit(std::vector<TokenId>(static_cast<size_t>(step.num_samples), 1));
    scheduler().finish(s);
    return num_cached;
  };
  EXPECT_EQ(cached(-1, 0, Pooling::kNone), 20);
  EXPECT_EQ(cached(0, 0, Pooling::kNone), 0);
  EXPECT_EQ(cached(0, 9, Pooling::kNone), 8);
  EXPECT_EQ(cached(0, 20, Pooling::kNone), 20);  // all are there already
  EXPECT_EQ(cached(-1, 0, Pooling::kLast), 20);
  EXPECT_EQ(cached(-1, 0, Pooling::kMean), 0);
}

TEST_F(SchedulerTest, APreemptedPromptIsNotScoredTwice) {
  config_.max_num_batched_tokens = 8;
  Sequence* s = make(20, 4);
  s->num_prompt_logprobs = 0;
  scheduler().add(s);
  EXPECT_EQ(plan().num_scored, 8);
  scheduler().commit({});
  s->score_begin = 8;
  scheduler().recompute_all();
  EXPECT_EQ(plan().num_scored, 0);
  scheduler().commit({});
  const Step step = plan();
  EXPECT_EQ(step.sequences[0].first_scored, 8);
  EXPECT_EQ(step.num_scored, 8);
}

TEST_F(SchedulerTest, ASequenceThatSamplesNothingIsNotPlannedBeyondItsPrompt) {
  config_.max_num_batched_tokens = 8;
  Sequence* s = add(12, 0);
  EXPECT_FALSE(plan().sequences[0].ends_prompt());
  const Step last = plan();  // on top of a step in flight
  EXPECT_TRUE(last.sequences[0].ends_prompt());
  EXPECT_EQ(last.num_samples, 0);
  scheduler().commit({});
  EXPECT_TRUE(plan().empty());
  scheduler().commit({});
  scheduler().finish(s);
  scheduler().check_invariants();
  EXPECT_FALSE(scheduler().has_work());
}

}  // namespace
}  // namespace vllm_lite
