// Drafts: how many of them a step computes, and what of them is kept at commit.

#include <string>
#include <tuple>

#include "scheduler_fixture.h"

namespace vllm_lite {
namespace {

using Tokens = std::vector<TokenId>;

class DraftsTest : public SchedulerTest {
 protected:
  DraftsTest() { config_.num_speculative_tokens = 4; }

  // Adds a sequence and computes its prompt: its last token, a 7, is to be computed next.
  Sequence* add_decoding(int32_t prompt, int32_t output, Tokens drafts = {}) {
    Sequence* s = add(prompt, output);
    while (s->num_output_tokens() == 0) step();
    s->drafts = std::move(drafts);
    return s;
  }
  void commit_tokens(const Tokens& sampled) {
    scheduler().commit(sampled);
    scheduler().check_invariants();
  }
  static const ScheduledSequence& part_of(const Step& step, const Sequence* sequence) {
    for (const ScheduledSequence& part : step.sequences) {
      if (part.sequence == sequence) return part;
    }
    throw InternalError("the sequence is not in the step");
  }
  static int32_t drafts_of(const Step& step, const Sequence* sequence) {
    return part_of(step, sequence).num_drafts;
  }
  static std::vector<int32_t> rounds(const Step& step) {
    return {step.draft_rounds.begin(), step.draft_rounds.end()};
  }
  static Tokens output(const Sequence* s) {
    return {s->tokens.begin() + s->num_prompt_tokens, s->tokens.end()};
  }
};

// --- commit ------------------------------------------------------------------------------------

TEST_F(DraftsTest, AllAreRight) {
  Sequence* s = add_decoding(4, 20, {11, 12, 13});
  const Step& step = plan();
  EXPECT_EQ(step.num_tokens, 4);
  EXPECT_EQ(step.num_samples, 1);
  EXPECT_EQ(step.num_drafts, 3);
  EXPECT_EQ(step.num_logits(), 4);
  EXPECT_EQ(rounds(step), (std::vector<int32_t>{1, 1, 1}));
  EXPECT_EQ(step.sequences[0].first_token, 4);
  EXPECT_EQ(step.sequences[0].num_tokens, 1);
  EXPECT_EQ(s->num_planned, 5);
  EXPECT_EQ(s->num_pending, 1);
  commit_tokens({11, 12, 13, 14});
  EXPECT_EQ(step.sequences[0].num_accepted, 3);
  EXPECT_EQ(output(s), (Tokens{7, 11, 12, 13, 14}));
  EXPECT_EQ(s->num_computed, 8);
  EXPECT_EQ(s->num_planned, 8);
  EXPECT_EQ(s->num_pending, 0);
  EXPECT_TRUE(s->drafts.empty());
  const Step& next = plan();
  EXPECT_EQ(next.sequences[0].first_token, 8);
  EXPECT_EQ(next.num_tokens, 1);
  EXPECT_EQ(next.num_drafts, 0);
  EXPECT_TRUE(next.draft_rounds.empty());
}

TEST_F(DraftsTest, FromTheFirstWrongOneOnNothingIsKept) {
  // The third draft is what was sampled after the second, or in its place: it is wrong all the
  // same.
  for (const TokenId third : {13, 50}) {
    scheduler_.reset();
    Sequence* s = add_decoding(4, 20, {11, 12, third});
    const Step& step = plan();
    commit_tokens({11, 50, 13, 14});
    EXPECT_EQ(step.sequences[0].num_accepted, 1);
    EXPECT_EQ(output(s), (Tokens{7, 11, 50}));
    EXPECT_EQ(s->num_computed, 6);
    EXPECT_EQ(plan().sequences[0].first_token, 6);
  }
}

TEST_F(DraftsTest, NoneIsRight) {
  Sequence* s = add_decoding(4, 20, {11, 12, 13});
  const Step& step = plan();
  commit_tokens({50, 12, 13, 14});
  EXPECT_EQ(step.sequences[0].num_accepted, 0);
  EXPECT_EQ(output(s), (Tokens{7, 50}));
  EXPECT_EQ(s->num_computed, 5);
  EXPECT_TRUE(s->drafts.empty());
}

TEST_F(DraftsTest, EachSequenceHasItsOwnLogitInEachRound) {
  Sequence* s[4];
  for (Sequence*& each : s) each = add(4, 20);
  step();
  s[0]->drafts = {11};
  s[1]->drafts = {21, 22, 23};
  s[3]->drafts = {41, 42};
  const Step& step = plan();
  EXPECT_EQ(step.num_tokens, 4 + 6);
  EXPECT_EQ(rounds(step), (std::vector<int32_t>{3, 2, 1}));
  commit_tokens({11, 21, 30, 50, /* first drafts */ 12, 22, 42, /* second */ 23, 43,
                 /* third */ 24});
  EXPECT_EQ(output(s[0]), (Tokens{7, 11, 12}));
  EXPECT_EQ(output(s[1]), (Tokens{7, 21, 22, 23, 24}));
  EXPECT_EQ(output(s[2]), (Tokens{7, 30}));
  EXPECT_EQ(output(s[3]), (Tokens{7, 50}));
  const SchedulerStats stats = scheduler().stats();
  EXPECT_EQ(stats.num_drafted_parts, 3);
  EXPECT_EQ(stats.num_draft_tokens, 6);
  EXPECT_EQ(stats.num_accepted_tokens, 4);
}

TEST_F(DraftsTest, CommitWantsATokenForEachLogit) {
  add_decoding(4, 20, {11, 12});
  plan();
  EXPECT_THROW(scheduler().commit(Tokens{11}), InternalError);
  EXPECT_THROW(scheduler().commit(Tokens{11, 12, 13, 14}), InternalError);
  commit_tokens({11, 12, 13});
}

TEST_F(DraftsTest, BlocksOfRightDraftsAreFoundAndThoseOfWrongOnesAreNot) {
  cache_config_.enable_prefix_caching = true;
  for (const bool is_right : {true, false}) {
    Sequence* s = add_decoding(4, 20, {11, 12, 13});  // they fill the second block
    Sequence* same = make(9, 1);
    std::copy(s->tokens.begin(), s->tokens.end(), same->tokens.begin());
    std::copy(s->drafts.begin(), s->drafts.end(), same->tokens.begin() + 5);
    plan();
    commit_tokens({11, 12, is_right ? 13 : 50, 14});
    scheduler().add(same);
    plan();
    EXPECT_EQ(same->num_cached_tokens, is_right ? 8 : 4);
    scheduler().finish(s);
    scheduler().finish(same);
    scheduler().cancel_steps();
  }
}

TEST_F(DraftsTest, ARowThatFailsAtOnceKeepsNothingOfTheStep) {
  Sequence* s = add_decoding(4, 20, {11, 12});
  Sequence* other = add_decoding(4, 20, {21});
  s->drafts = {11, 12};  // the step that computed the other's prompt cleared them
  const Step& step = plan();
  commit_tokens({kNoToken, 21, 12, 22, 13});
  EXPECT_EQ(step.sequences[0].num_accepted, 0);
  EXPECT_EQ(s->num_computed, 5);
  EXPECT_EQ(s->num_planned, 5);
  EXPECT_EQ(s->num_pending, 0);
  EXPECT_EQ(s->num_output_tokens(), 2);
  EXPECT_EQ(output(other), (Tokens{7, 21, 22}));
}

TEST_F(DraftsTest, ARowThatFailsAtOnceWithAllItsTokensPublishesNoneOfThem) {
  cache_config_.enable_prefix_caching = true;
  Sequence* s = add_decoding(12, 20, {11, 12});
  Sequence* same = make(13, 1);
  std::copy(s->tokens.begin(), s->tokens.end(), same->tokens.begin());
  scheduler().recompute_all();
  const Step& step = plan();
  EXPECT_EQ(step.sequences[0].num_tokens, 13);
  EXPECT_EQ(step.sequences[0].num_drafts, 2);
  commit_tokens({kAllMasked, 11, 12});
  EXPECT_EQ(s->num_computed, 0);
  scheduler().finish(s);
  scheduler().add(same);
  plan();
  EXPECT_EQ(same->num_cached_tokens, 0);
}

TEST_F(DraftsTest, ARowThatFailsAtARightDraftKeepsWhatWasBeforeAndPublishesNoMore) {
  cache_config_ = {.num_blocks = 64, .block_size = 1, .enable_prefix_caching = true};
  Sequence* s = add_decoding(3, 20, {11, 12, 13});
  Sequence* same = make(8, 1);
  std::copy(s->tokens.begin(), s->tokens.end(), same->tokens.begin());
  std::copy(s->drafts.begin(), s->drafts.end(), same->tokens.begin() + 4);
  const Step& step = plan();
  commit_tokens({11, 12, kNoToken, 14});
  EXPECT_EQ(step.sequences[0].num_accepted, 2);
  EXPECT_EQ(output(s), (Tokens{7, 11, 12}));
  EXPECT_EQ(s->num_computed, 5);  // not the 12, after which it failed
  scheduler().finish(s);
  scheduler().add(same);
  plan();
  EXPECT_EQ(same->num_cached_tokens, 5);
}

TEST_F(DraftsTest, ARowThatFailsAtAWrongDraftHasNotFailed) {
  Sequence* s = add_decoding(4, 20, {11, 12, 13});
  plan();
  commit_tokens({11, 50, kNoToken, kAllMasked});
  EXPECT_EQ(output(s), (Tokens{7, 11, 50}));
  EXPECT_EQ(s->num_computed, 6);
}

TEST_F(DraftsTest, FinishedInFlightGetsNothingAndTheOthersTheirOwn) {
  Sequence* a = add(4, 20);
  Sequence* b = add(4, 20);
  step();
  a->drafts = {11, 12};
  b->drafts = {21, 22};
  plan();
  scheduler().finish(a);
  scheduler().check_invariants();
  commit_tokens({11, 21, 12, 22, 13, 23});
  EXPECT_EQ(output(a), (Tokens{7}));
  EXPECT_EQ(output(b), (Tokens{7, 21, 22, 23}));
  scheduler().finish(b);
  EXPECT_EQ(cache_->num_used_blocks(), 0);
}

TEST_F(DraftsTest, CancelledStepIsPlannedAgainWithItsDrafts) {
  Sequence* s = add_decoding(4, 20, {11, 12, 13, 14});
  plan();
  scheduler().cancel_steps();
  scheduler().check_invariants();
  EXPECT_EQ(s->num_computed, 4);
  EXPECT_EQ(s->num_planned, 4);
  EXPECT_EQ(s->num_tokens(), 5);
  EXPECT_EQ(scheduler().stats().num_draft_tokens, 0);
  const Step& again = plan();
  EXPECT_EQ(again.num_drafts, 4);
  commit_tokens({11, 12, 13, 14, 15});
  EXPECT_EQ(output(s), (Tokens{7, 11, 12, 13, 14, 15}));
}

TEST_F(DraftsTest, PreemptedAndResumedTheyComeBehindAllTokens) {
  Sequence* a = add(28, 30);
  Sequence* b = add(28, 30);  // 16 blocks of 4: full once both have 32 tokens
  while (b->num_computed < 32) step();
  b->drafts = {11, 12};
  const Step& preempting = plan();
  ASSERT_EQ(b->state, SequenceState::kWaiting);
  EXPECT_EQ(preempting.num_drafts, 0);
  commit(preempting);
  scheduler().finish(a);
  EXPECT_EQ(b->drafts, (Tokens{11, 12}));
  const Step& resumed = plan();
  EXPECT_TRUE(resumed.sequences[0].new_row);
  EXPECT_EQ(resumed.sequences[0].num_tokens, 33);
  EXPECT_EQ(resumed.sequences[0].num_drafts, 2);
  commit_tokens({11, 12, 13});
  EXPECT_EQ(b->num_tokens(), 36);
  EXPECT_EQ(b->num_computed, 35);
}

TEST_F(DraftsTest, RecomputedInChunksTheyComeWithTheLast) {
  config_.max_num_batched_tokens = 10;
  Sequence* s = add_decoding(14, 20, {11, 12});
  scheduler().recompute_all();
  const Step& first = plan();
  EXPECT_EQ(first.num_tokens, 10);
  EXPECT_EQ(first.num_drafts, 0);
  commit_tokens({});
  EXPECT_EQ(s->drafts, (Tokens{11, 12}));
  const Step& last = plan();
  EXPECT_EQ(last.sequences[0].num_tokens, 5);
  EXPECT_EQ(last.sequences[0].num_drafts, 2);
  commit_tokens({11, 50, 13});
  EXPECT_EQ(s->num_tokens(), 17);
}

// --- how many ----------------------------------------------------------------------------------

TEST_F(DraftsTest, NoMoreThanNumSpeculativeTokensAndZeroLooksAtNone) {
  for (const int32_t limit : {3, 1, 0}) {
    scheduler_.reset();
    config_.num_speculative_tokens = limit;
    Sequence* s = add_decoding(4, 20, {11, 12, 13, 14});
    const Step& step = plan();
    EXPECT_EQ(drafts_of(step, s), limit);
    commit(step, 50);
    EXPECT_EQ(s->drafts.empty(), limit > 0);
  }
}

TEST_F(DraftsTest, NumSpeculativeTokensOutOfRangeIsRefused) {
  for (const int32_t value : {-1, kMaxDrafts + 1}) {
    scheduler_.reset();
    config_.num_speculative_tokens = value;
    const std::string error = error_of([&] { scheduler(); });
    EXPECT_NE(error.find("num_speculative_tokens is " + std::to_string(value)), std::string::npos)
        << error;
  }
  config_.num_speculative_tokens = kMaxDrafts;
  Sequence* s = add_decoding(4, 30, Tokens(kMaxDrafts, 7));
  const Step& step = plan();
  EXPECT_EQ(drafts_of(step, s), kMaxDrafts);
  commit(step, 7);
  EXPECT_EQ(s->num_output_tokens(), 1 + kMaxDrafts + 1);
}

TEST_F(DraftsTest, TheBudgetGoesToTheFirst) {
  config_.max_num_batched_tokens = 8;
  Sequence* s[3];
  for (Sequence*& each : s) each = add_decoding(4, 40);
  for (Sequence* each : s) each->drafts = {11, 12, 13};
  const Step& step = plan();
  EXPECT_EQ(drafts_of(step, s[0]), 3);
  EXPECT_EQ(drafts_of(step, s[1]), 2);
  EXPECT_EQ(drafts_of(step, s[2]), 0);
  EXPECT_EQ(step.num_tokens, 8);
  commit(step, 50);
  EXPECT_TRUE(s[2]->drafts.empty());  // its token has come all the same
}

TEST_F(DraftsTest, MaxNumLogitsHoldsForSamplesAndDraftsTogether) {
  for (const auto& [limit, first, second] :
       {std::tuple(9, 4, 3), std::tuple(5, 3, 0), std::tuple(2, 0, 0), std::tuple(0, 4, 4)}) {
    scheduler_.reset();
    config_.max_num_seqs = 2;
    config_.max_num_logits = limit;
    Sequence* a = add(4, 20);
    Sequence* b = add(4, 20);
    step();
    a->drafts = b->drafts = {11, 12, 13, 14};
    const Step& step = plan();
    EXPECT_EQ(drafts_of(step, a), first) << limit;
    EXPECT_EQ(drafts_of(step, b), second) << limit;
    EXPECT_EQ(step.num_logits(), step.num_tokens) << limit;
  }
}

TEST_F(DraftsTest, FewerLogitsThanSequencesMayRunAreRefused) {
  config_.max_num_logits = 3;
  const std::string error = error_of([&] { scheduler(); });
  EXPECT_NE(error.find("max_num_logits is 3"), std::string::npos) << error;
  EXPECT_NE(error.find("at least max_num_seqs, which is 4"), std::string::npos) << error;
}

TEST_F(DraftsTest, WithAllRightASequenceHasNoMoreThanMaxTotalTokens) {
  for (int32_t output = 2; output < 8; ++output) {
    Sequence* s = add_decoding(4, output, {11, 11, 11, 11});
    const Step& step = plan();
    EXPECT_EQ(drafts_of(step, s), std::min(output - 2, 4));
    commit(step, 11);
    EXPECT_EQ(s->num_output_tokens(), std::min(output, 6));
    EXPECT_EQ(s->state == SequenceState::kFinished, output <= 6);
  }
}

TEST_F(DraftsTest, MaxChunkTokensHoldsForTokensAndDraftsTogether) {
  for (const int32_t chunk : {3, 1}) {
    scheduler_.reset();
    config_.max_chunk_tokens = chunk;
    Sequence* s = add_decoding(4, 20, {11, 12, 13, 14});
    EXPECT_EQ(drafts_of(plan(), s), chunk - 1);
  }
}

TEST_F(DraftsTest, BlocksThatAreLeftGoToTheFirstAndNobodyIsPreempted) {
  cache_config_ = {.num_blocks = 6, .block_size = 2, .enable_prefix_caching = false};
  config_.max_model_len = 12;
  Sequence* a = add(3, 9);
  Sequence* b = add(3, 9);
  step();
  a->drafts = b->drafts = {11, 11, 11, 11};
  // Both have 4 tokens and 2 blocks; two blocks are left.
  const Step& first = plan();
  EXPECT_EQ(drafts_of(first, a), 4);
  EXPECT_EQ(drafts_of(first, b), 0);
  EXPECT_EQ(cache_->num_available_blocks(), 0);
  commit(first, 50);
  // 5 tokens each: what the drafts of a took is there for the fifth token of b.
  EXPECT_EQ(cache_->num_available_blocks(), 2);
  a->drafts = {11, 11, 11, 11};
  const Step& second = plan();
  EXPECT_EQ(tokens_of(second, b), 1);
  EXPECT_EQ(drafts_of(second, a), 1);  // in the block of its fifth token
  EXPECT_EQ(scheduler().stats().num_preemptions, 0);
}

TEST_F(DraftsTest, TheLastBlockIsFilledThoughItDoesNotHoldAll) {
  cache_config_ = {.num_blocks = 5, .block_size = 2, .enable_prefix_caching = false};
  config_.max_model_len = 10;
  Sequence* s = add(3, 7);
  Sequence* other = add(3, 7);
  step();
  s->drafts = {11, 12, 13, 14};  // for two blocks, but one is left
  const Step& step = plan();
  EXPECT_EQ(drafts_of(step, s), 2);
  EXPECT_EQ(tokens_of(step, other), 1);
  EXPECT_EQ(cache_->num_available_blocks(), 0);
  EXPECT_EQ(scheduler().stats().num_preemptions, 0);
}

TEST_F(DraftsTest, ThoseRunningAndThoseAdmittedComeFirst) {
  config_.max_num_batched_tokens = 12;
  cache_config_.num_blocks = 20;
  Sequence* drafter = add_decoding(4, 30);
  Sequence* prompt = add(20, 4);
  step();  // its first 11 tokens
  Sequence* waiting = add(6, 4);
  drafter->drafts = {11, 12, 13, 14};
  const Step& full = plan();
  EXPECT_EQ(tokens_of(full, prompt), 9);
  EXPECT_EQ(tokens_of(full, waiting), 2);
  EXPECT_EQ(drafts_of(full, drafter), 0);
  commit(full);
  drafter->drafts = {11, 12, 13, 14};
  const Step& step = plan();
  EXPECT_EQ(tokens_of(step, waiting), 4);
  EXPECT_EQ(drafts_of(step, drafter), 4);
  EXPECT_EQ(step.num_samples, 3);
  EXPECT_EQ(step.num_tokens, 1 + 4 + 1 + 4);
}

TEST_F(DraftsTest, AnAdmissionTakesTheBlocksBeforeThem) {
  cache_config_ = {.num_blocks = 8, .block_size = 4, .enable_prefix_caching = false};
  config_.max_model_len = 32;
  Sequence* drafter = add_decoding(6, 20);  // 2 blocks, 7 tokens
  Sequence* waiting = add(20, 4);           // 5 blocks and one of headroom
  drafter->drafts = {11, 12, 13, 14};
  const Step& step = plan();
  EXPECT_EQ(tokens_of(step, waiting), 20);
  EXPECT_EQ(drafts_of(step, drafter), 4);  // the headroom is for those who run
  EXPECT_EQ(cache_->num_available_blocks(), 0);
}

// --- beside others -----------------------------------------------------------------------------

TEST_F(DraftsTest, BeamsBesideThemAreAsWithout) {
  BeamGroup group;
  for (int32_t i = 0; i < 2; ++i) group.beams.push_back(make(4, 10));
  for (Sequence* beam : group.beams) beam->group = &group;
  group.first = group.beams.front();
  scheduler().add(group.first);
  step();
  const Scheduler::NextBeam both[] = {{0, 50}, {0, 51}};
  scheduler().set_beams(group, both);
  Sequence* s = add_decoding(4, 20);
  scheduler().set_beams(group, both);
  s->drafts = {11, 12};
  const Step& step = plan();
  EXPECT_EQ(step.num_samples, 3);
  EXPECT_EQ(step.num_drafts, 2);
  EXPECT_EQ(rounds(step), (std::vector<int32_t>{1, 1}));
  for (const Sequence* beam : group.beams) EXPECT_EQ(drafts_of(step, beam), 0);
  commit_tokens({1, 2, 11, 12, 13});
  EXPECT_EQ(output(s), (Tokens{7, 11, 12, 13}));
  for (const Sequence* beam : group.beams) EXPECT_EQ(beam->num_computed, beam->num_tokens());
  const Scheduler::NextBeam swapped[] = {{1, 60}, {0, 61}};
  scheduler().set_beams(group, swapped);
  scheduler().check_invariants();
  scheduler().finish(s);
  scheduler().finish(group.first);
  EXPECT_EQ(cache_->num_used_blocks(), 0);
}

TEST_F(DraftsTest, PromptsThatAreScoredOrPooledBesideThemAreAsWithout) {
  Sequence* s = add_decoding(4, 20, {11, 12});
  Sequence* scored = make(6, 4);
  scored->num_prompt_logprobs = 2;
  Sequence* pooled = make(5, 0);
  pooled->pooling = Pooling::kMean;
  scheduler().add(scored);
  scheduler().add(pooled);
  const Step& step = plan();
  EXPECT_EQ(drafts_of(step, s), 2);
  EXPECT_EQ(step.num_samples, 2);
  EXPECT_EQ(step.num_scored, 5);
  EXPECT_EQ(part_of(step, scored).first_scored, 0);
  EXPECT_EQ(step.num_pooled, 1);
  EXPECT_EQ(step.num_vectors, 1);
  EXPECT_TRUE(part_of(step, pooled).ends_prompt());
  scheduler().commit(Tokens{11, 21, 12, 13});
  scheduler().finish(pooled);
  scheduler().check_invariants();
  EXPECT_EQ(output(s), (Tokens{7, 11, 12, 13}));
  EXPECT_EQ(output(scored), (Tokens{21}));
  scored->drafts = {31};
  const Step& next = plan();
  EXPECT_EQ(drafts_of(next, scored), 1);
  EXPECT_EQ(next.num_scored, 0);
}

TEST_F(DraftsTest, ASampleForksThePromptOfAParentThatHasDrafts) {
  config_.max_num_seqs = 2;
  Sequence* blocker = add(4, 2);
  Sequence* parent = add(10, 20);
  Sequence* fork = add_fork(parent);  // no row for it yet
  step();
  parent->drafts = {11, 12, 13};
  commit_tokens((plan(), Tokens{7, 11, 50, 13, 14}));
  ASSERT_EQ(blocker->num_output_tokens(), 2);
  scheduler().finish(blocker);
  parent->drafts = {21};
  const Step& step = plan();
  EXPECT_EQ(tokens_of(step, fork), 1);
  EXPECT_EQ(part_of(step, fork).first_token, 9);
  EXPECT_EQ(drafts_of(step, parent), 1);
  EXPECT_EQ(step.copies.size(), 1u);
  commit_tokens({21, 31, 22});
  EXPECT_EQ(output(parent), (Tokens{7, 11, 50, 21, 22}));
  EXPECT_EQ(output(fork), (Tokens{31}));
}

TEST_F(DraftsTest, BehindASlidingWindowBlocksComeBackAsTokensAreAccepted) {
  cache_config_.sliding_window = 4;
  Sequence* s = add_decoding(4, 40);
  for (int32_t i = 0; i < 6; ++i) {
    s->drafts = Tokens(4, 7);
    commit(plan());
  }
  EXPECT_EQ(s->num_output_tokens(), 1 + 6 * 5);
  EXPECT_LE(cache_->num_used_blocks(), 3);
  run_until_idle();
}

}  // namespace
}  // namespace vllm_lite
