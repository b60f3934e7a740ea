// Asynchronous scheduling: a step is planned while the one before is in flight.

#include "scheduler_fixture.h"

namespace vllm_lite {
namespace {

class AsyncTest : public SchedulerTest {
 protected:
  // Commits the oldest step without judging ends.
  void commit_token(TokenId token) {
    const auto num_samples = static_cast<size_t>(scheduler().step_in_flight(0).num_samples);
    scheduler().commit(std::vector<TokenId>(num_samples, token));
    scheduler().check_invariants();
  }
  void finish(Sequence* sequence) {
    scheduler().finish(sequence);
    scheduler().check_invariants();
  }
  // Keeps two steps in flight until `victim` is preempted by the second of them.
  void run_until_preempted(const Sequence* victim) {
    plan();
    for (int32_t i = 0; victim->num_preemptions == 0; ++i) {
      ASSERT_LT(i, 100);
      if (i > 0) commit_token(7);
      plan();
    }
  }
};

TEST_F(AsyncTest, DecodeIsPlannedBeforeItsTokenIsKnown) {
  Sequence* s = add(4, 8);
  const Step& first = plan();
  const Step& second = plan();
  ASSERT_EQ(second.sequences.size(), 1u);
  EXPECT_EQ(second.sequences[0].first_token, 4);
  EXPECT_EQ(second.sequences[0].num_tokens, 1);
  EXPECT_TRUE(second.sequences[0].samples);
  EXPECT_EQ(s->num_tokens(), 4);
  EXPECT_EQ(s->num_pending, 2);
  EXPECT_EQ(s->num_computed, 0);
  commit(first, 42);
  EXPECT_EQ(s->num_computed, 4);
  EXPECT_EQ(s->num_planned, 5);
  commit(second, 43);
  EXPECT_EQ(s->tokens, (std::vector<TokenId>{1001, 1, 2, 3, 42, 43}));
  EXPECT_FALSE(scheduler().in_flight(s));
}

TEST_F(AsyncTest, ChunksFollowEachOtherInFlight) {
  config_.max_chunk_tokens = 6;
  Sequence* s = add(10, 2);
  plan();
  const Step& second = plan();
  EXPECT_EQ(second.sequences[0].first_token, 6);
  EXPECT_EQ(second.sequences[0].num_tokens, 4);
  EXPECT_TRUE(second.sequences[0].samples);
  commit_token(7);
  EXPECT_EQ(s->num_computed, 6);
  const Step& third = plan();
  EXPECT_EQ(third.sequences[0].first_token, 10);
  commit_token(7);
  commit_token(7);
  EXPECT_EQ(s->num_output_tokens(), 2);
}

TEST_F(AsyncTest, NothingIsPlannedBeyondTheLimit) {
  Sequence* s = add(4, 2);
  plan();
  plan();  // samples the last token
  commit_token(7);
  EXPECT_TRUE(plan().empty());
  EXPECT_EQ(scheduler().num_in_flight(), 1);
  EXPECT_EQ(s->block_table.blocks.size(), 2u);
  commit_token(7);
  EXPECT_EQ(s->num_tokens(), s->max_total_tokens);
  finish(s);
  EXPECT_TRUE(plan().empty());
}

TEST_F(AsyncTest, LimitOfTheModelLengthFillsTheWholePoolAndNoMore) {
  Sequence* s = add(60, 4);  // 16 blocks
  for (int32_t i = 0; i < 4; ++i) {
    EXPECT_FALSE(plan().empty());
    EXPECT_LE(s->block_table.blocks.size(), 16u);
    if (i > 0) commit_token(7);
  }
  EXPECT_TRUE(plan().empty());
  commit_token(7);
  EXPECT_EQ(s->num_tokens(), 64);
  EXPECT_EQ(s->num_preemptions, 0);
}

TEST_F(AsyncTest, WhatAStopOvertookIsThrownAwayAndNotPublished) {
  cache_config_.enable_prefix_caching = true;
  Sequence* s = make(7, 20, 5);
  scheduler().add(s);
  plan();
  plan();           // token 7 fills the second block
  commit_token(0);  // and is a stop
  finish(s);
  EXPECT_TRUE(scheduler().in_flight(s));
  EXPECT_EQ(cache_->num_used_blocks(), 0);
  commit_token(9);
  EXPECT_FALSE(scheduler().in_flight(s));
  EXPECT_EQ(s->num_output_tokens(), 1);
  Sequence* same = make(9, 4, 5);
  same->tokens[7] = 0;
  scheduler().add(same);
  plan();
  EXPECT_EQ(same->num_cached_tokens, 4);
}

TEST_F(AsyncTest, RowAndBlocksOfAStoppedSequenceGoToTheNextPlan) {
  config_.max_num_seqs = 1;
  cache_config_.num_blocks = 16;
  Sequence* s = add(60, 4);
  Sequence* next = add(60, 4);
  plan();
  plan();
  commit_token(7);
  finish(s);
  const Step& third = plan();  // while the second, which was overtaken, is in flight
  EXPECT_EQ(freed(third), std::vector<RowId>{0});
  ASSERT_EQ(third.sequences.size(), 1u);
  EXPECT_EQ(third.sequences[0].sequence, next);
  EXPECT_TRUE(third.sequences[0].new_row);
  EXPECT_EQ(next->row, 0);
  commit_token(9);
  EXPECT_EQ(next->num_output_tokens(), 0);
  commit_token(8);
  EXPECT_EQ(next->tokens.back(), 8);
  EXPECT_EQ(s->num_output_tokens(), 1);
}

TEST_F(AsyncTest, PreemptedSequenceGetsTheTokenThatIsToComeAndResumesWithKnownTokens) {
  Sequence* a = add(28, 30);
  Sequence* b = add(28, 30);
  run_until_preempted(b);
  EXPECT_EQ(b->state, SequenceState::kWaiting);
  EXPECT_EQ(b->num_pending, 1);
  EXPECT_EQ(b->row, -1);
  EXPECT_EQ(b->num_planned, 0);
  const int32_t num_tokens = b->num_tokens();
  commit_token(77);
  EXPECT_EQ(b->num_tokens(), num_tokens + 1);
  EXPECT_EQ(b->tokens.back(), 77);
  EXPECT_EQ(b->num_pending, 0);
  EXPECT_EQ(b->num_computed, 0);
  finish(a);
  const Step& resumed = plan();
  ASSERT_EQ(resumed.sequences.size(), 1u);
  EXPECT_EQ(resumed.sequences[0].sequence, b);
  EXPECT_EQ(resumed.sequences[0].first_token, 0);
  EXPECT_EQ(resumed.sequences[0].num_tokens, num_tokens + 1);
  EXPECT_TRUE(resumed.sequences[0].samples);
}

TEST_F(AsyncTest, PreemptedSequenceMayEndByTheTokenThatWasToCome) {
  Sequence* a = add(28, 30);
  Sequence* b = add(28, 30);
  run_until_preempted(b);
  commit_token(0);
  finish(b);
  EXPECT_EQ(b->row, -1);
  commit_token(7);
  finish(a);
  EXPECT_TRUE(plan().empty());
  EXPECT_EQ(cache_->num_used_blocks(), 0);
}

TEST_F(AsyncTest, PreemptedSequenceIsAbortedBeforeItsTokenComes) {
  add(28, 30);
  Sequence* b = add(28, 30);
  run_until_preempted(b);
  const int32_t num_tokens = b->num_tokens();
  finish(b);
  EXPECT_TRUE(scheduler().in_flight(b));
  commit_token(7);
  EXPECT_FALSE(scheduler().in_flight(b));
  EXPECT_EQ(b->num_tokens(), num_tokens);
}

TEST_F(AsyncTest, PreemptedSequenceIsNotAdmittedBeforeItsTokenComes) {
  cache_config_.num_blocks = 17;
  Sequence* a = add(32, 2);
  Sequence* b = add(31, 30);
  plan();
  plan();  // a's last token; together they fill the pool
  commit_token(7);
  EXPECT_TRUE(plan().empty());  // b needs a block that there is not
  ASSERT_EQ(b->state, SequenceState::kWaiting);
  finish(a);
  add(4, 4);
  EXPECT_TRUE(plan().empty());  // there is room, but nobody goes before b
  commit_token(8);
  EXPECT_EQ(b->tokens.back(), 8);
  EXPECT_EQ(tokens_of(plan(), b), 33);
}

TEST_F(AsyncTest, SequenceWhoseLastTokenIsToComeYieldsItsBlocksToAnUrgentOne) {
  config_.policy = SchedulingPolicy::kPriority;
  cache_config_.num_blocks = 17;
  Sequence* a = add(32, 2);
  Sequence* b = make(31, 30);
  b->priority = -1;
  scheduler().add(b);
  plan();
  plan();  // a's last token; together they fill the pool
  commit_token(7);
  EXPECT_EQ(tokens_of(plan(), b), 1);
  EXPECT_EQ(a->state, SequenceState::kWaiting);
  EXPECT_EQ(a->num_pending, 1);
  commit_token(8);
  EXPECT_EQ(a->num_tokens(), 34);
  finish(a);
  commit_token(7);
  EXPECT_EQ(b->num_output_tokens(), 3);
}

TEST_F(AsyncTest, AbortWithTwoStepsInFlight) {
  Sequence* a = add(8, 4);
  Sequence* b = add(8, 4);
  plan();
  plan();
  finish(a);
  EXPECT_EQ(cache_->num_used_blocks(), 3);
  commit_token(7);
  EXPECT_TRUE(scheduler().in_flight(a));
  commit_token(7);
  EXPECT_FALSE(scheduler().in_flight(a));
  EXPECT_EQ(a->num_output_tokens(), 0);
  EXPECT_EQ(b->num_output_tokens(), 2);
}

TEST_F(AsyncTest, FailedRowLosesTheNextStepAsWell) {
  cache_config_.enable_prefix_caching = true;
  Sequence* s = make(8, 4, 5);
  scheduler().add(s);
  plan();
  plan();
  const TokenId dropped = kNoToken;
  scheduler().commit({&dropped, 1});
  finish(s);
  commit_token(9);
  EXPECT_EQ(s->num_tokens(), 8);
  Sequence* same = make(9, 4, 5);
  scheduler().add(same);
  plan();
  EXPECT_EQ(same->num_cached_tokens, 0);
}

TEST_F(AsyncTest, CancelTakesBothStepsBack) {
  Sequence* old = add(4, 20);
  Sequence* gone = add(4, 1);
  step();  // `gone` ends and frees its row
  Sequence* fresh = add(4, 4);
  const Step& first = plan();
  ASSERT_EQ(freed(first), std::vector<RowId>{1});
  ASSERT_EQ(fresh->row, 1);
  Sequence* fresher = add(4, 4);
  plan();
  old->num_blocks_sent = fresh->num_blocks_sent = fresher->num_blocks_sent = 2;
  scheduler().cancel_steps();
  scheduler().check_invariants();
  EXPECT_EQ(scheduler().num_in_flight(), 0);
  EXPECT_EQ(old->state, SequenceState::kRunning);
  EXPECT_EQ(old->num_planned, 4);
  EXPECT_EQ(old->num_blocks_sent, 1);  // entry 1, where token 4 goes, is sent again
  for (const Sequence* s : {fresh, fresher}) {
    EXPECT_EQ(s->state, SequenceState::kWaiting);
    EXPECT_EQ(s->num_cached_tokens, -1);
    EXPECT_EQ(s->num_preemptions, 0);
  }
  const Step& again = plan();
  EXPECT_EQ(again.freed_rows.size(), 2u);  // given in the steps; one was freed before as well
  EXPECT_EQ(again.sequences.size(), 3u);
  commit(again);
  run_until_idle();
  EXPECT_EQ(gone->num_output_tokens(), 1);
  EXPECT_EQ(fresher->num_output_tokens(), 4);
}

TEST_F(AsyncTest, CancelFindsASequenceThatTheSecondStepPreempted) {
  add(28, 30);
  Sequence* b = add(28, 30);
  run_until_preempted(b);
  const int32_t num_tokens = b->num_tokens();
  scheduler().cancel_steps();
  scheduler().check_invariants();
  EXPECT_EQ(b->num_pending, 0);
  EXPECT_EQ(b->num_tokens(), num_tokens);
  run_until_idle();
  EXPECT_EQ(b->num_output_tokens(), 30);
}

TEST_F(AsyncTest, PromptIsForkedAndHitOnlyOnceItIsCommitted) {
  cache_config_.enable_prefix_caching = true;
  Sequence* parent = make(10, 4, 5);
  scheduler().add(parent);
  Sequence* fork = make(10, 4, 5);
  fork->fork_parent = parent;
  scheduler().add(fork);
  plan();
  Sequence* same = make(10, 4, 5);
  scheduler().add(same);
  const Step& second = plan();
  EXPECT_EQ(tokens_of(second, fork), 0);
  EXPECT_EQ(same->num_cached_tokens, 0);
  commit_token(7);
  const Step& third = plan();
  EXPECT_EQ(tokens_of(third, fork), 1);
  EXPECT_EQ(third.copies.size(), 1u);
}

}  // namespace
}  // namespace vllm_lite
