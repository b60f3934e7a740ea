// The words of a plan.

#include "scheduler/step_builder.h"

#include <bit>
#include <cstddef>
#include <limits>

#include "scheduler/plan_view.h"
#include "scheduler_fixture.h"

namespace vllm_lite {
namespace {

using Ints = std::vector<int32_t>;

Ints ints(std::span<const int32_t> words) { return {words.begin(), words.end()}; }

class StepBuilderTest : public SchedulerTest {
 protected:
  std::span<const int32_t> build() {
    if (builder_ == nullptr) {
      scheduler();
      builder_ = std::make_unique<StepBuilder>(config_, cache_config_.block_size);
    }
    return builder_->build(plan(), ++step_id_);
  }
  void commit_tokens(const std::vector<TokenId>& tokens) { scheduler().commit(tokens); }
  static std::vector<Ints> updates(const PlanView& plan) {
    std::vector<Ints> result;
    for (int32_t i = 0; i < plan.header().num_table_updates; ++i) {
      const TableUpdate u = plan.table_update(i);
      result.push_back({u.row, u.index, u.block});
    }
    return result;
  }

  std::unique_ptr<StepBuilder> builder_;
  uint64_t step_id_ = (uint64_t{3} << 32) - 1;
};

TEST_F(StepBuilderTest, MixedStepHasEverySectionAsTheFormatSays) {
  config_.max_num_batched_tokens = 8;
  Sequence* a = add(3, 8);
  {
    const PlanView plan(build());
    EXPECT_EQ(plan.step(), uint64_t{3} << 32);
    EXPECT_EQ(ints(plan.token_ids()), a->tokens);
    EXPECT_EQ(plan.header().num_new_rows, 1);
  }
  commit_tokens({42});
  Sequence* b = add(9, 4);  // gets 7 of its 9 tokens
  const PlanView plan(build());
  const BlockId a0 = a->block_table.blocks[0];
  const std::vector<BlockId>& bb = b->block_table.blocks;
  EXPECT_EQ(ints(plan.token_ids()), (Ints{42, b->tokens[0], 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(ints(plan.positions()), (Ints{3, 0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(ints(plan.query_start()), (Ints{0, 1, 8}));
  EXPECT_EQ(ints(plan.seq_lens()), (Ints{4, 7}));
  EXPECT_EQ(ints(plan.rows()), (Ints{a->row, b->row}));
  EXPECT_EQ(ints(plan.logits_indices()), (Ints{0}));
  EXPECT_EQ(plan.slot(0), 4 * a0 + 3);
  for (int32_t i = 0; i < 7; ++i) {
    EXPECT_EQ(plan.slot(1 + i), 4 * bb[static_cast<size_t>(i / 4)] + i % 4);
  }
  EXPECT_EQ(updates(plan),
            (std::vector<Ints>{{b->row, 0, bb[0]}, {b->row, 1, bb[1]}, {b->row, 2, bb[2]}}));
  EXPECT_EQ(plan.header().max_query_len, 7);
  EXPECT_EQ(plan.header().max_seq_len, 7);
  EXPECT_EQ(plan.header().num_freed_rows, 0);
  EXPECT_EQ(plan.header().num_block_copies, 0);
}

TEST_F(StepBuilderTest, TokensThatAreToComeHaveTheirRowsPlaceholders) {
  config_.max_num_batched_tokens = 16;
  Sequence* a = add(3, 8);
  Sequence* b = add(2, 8);
  EXPECT_EQ(PlanView(build()).header().num_placeholders, 0);
  Sequence* c = add(2, 8);
  const PlanView second(build());
  EXPECT_EQ(ints(second.token_ids()), (Ints{-1 - a->row, -1 - b->row, c->tokens[0], 1}));
  EXPECT_EQ(ints(second.positions()), (Ints{3, 2, 0, 1}));
  EXPECT_EQ(ints(second.logits_indices()), (Ints{0, 1, 3}));
  EXPECT_EQ(second.header().num_placeholders, 2);
  commit_tokens({41, 42});
  commit_tokens({51, 52, 53});
  EXPECT_EQ(ints(PlanView(build()).token_ids()), (Ints{51, 52, 53}));
}

TEST_F(StepBuilderTest, TableEntriesAreSentOnceAndANewRowSendsAll) {
  Sequence* a = add(4, 20);
  EXPECT_EQ(updates(PlanView(build())).size(), 1u);
  commit_tokens({1});
  const auto grown = updates(PlanView(build()));
  EXPECT_EQ(grown, (std::vector<Ints>{{a->row, 1, a->block_table.blocks[1]}}));
  for (int32_t i = 0; i < 3; ++i) {
    commit_tokens({1});
    EXPECT_TRUE(updates(PlanView(build())).empty());
  }
  commit_tokens({1});
  EXPECT_EQ(updates(PlanView(build())).size(), 1u);
  scheduler().cancel_steps();
  scheduler().recompute_all();
  const PlanView again(build());
  EXPECT_EQ(updates(again).size(), a->block_table.blocks.size());
  EXPECT_EQ(again.header().num_new_rows, 1);
}

TEST_F(StepBuilderTest, CancelledStepIsSentAgain) {
  Sequence* a = add(4, 20);
  build();
  commit_tokens({1});
  const auto first = updates(PlanView(build()));
  scheduler().cancel_steps();
  EXPECT_EQ(updates(PlanView(build())), first);
  EXPECT_EQ(a->num_blocks_sent, 2);
}

TEST_F(StepBuilderTest, NewRowCarriesItsSamplingParametersAndHistoryOnlyForPenalties) {
  sampling_.row.temperature = 0.7f;
  sampling_.row.top_k = 11;
  sampling_.row.seed_high = 0xdeadbeef;
  sampling_.bias_ids = {5, 6};
  sampling_.bias_values = {-1.5f, 2.25f};
  sampling_.allowed_ids = {1, 2, 3};
  sampling_.stop_ids = {9};
  sampling_.row.min_total_tokens = 4;
  SamplingParams penalised;
  penalised.row.presence_penalty = 0.5f;
  penalised.stop_ids = {9};  // no minimum: the worker needs none of them
  Sequence* a = add(3, 2);
  Sequence* b = make(5, 2);
  b->sampling = &penalised;
  scheduler().add(b);
  const PlanView plan(build());
  const std::vector<NewRow> rows = plan.new_rows();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].row, a->row);
  EXPECT_EQ(rows[0].sampling.row.temperature, 0.7f);
  EXPECT_EQ(rows[0].sampling.row.top_k, 11);
  EXPECT_EQ(rows[0].sampling.row.seed_high, 0xdeadbeef);
  EXPECT_EQ(rows[0].sampling.bias_ids, sampling_.bias_ids);
  EXPECT_EQ(rows[0].sampling.bias_values, sampling_.bias_values);
  EXPECT_EQ(rows[0].sampling.allowed_ids, sampling_.allowed_ids);
  EXPECT_EQ(rows[0].sampling.stop_ids, sampling_.stop_ids);
  EXPECT_TRUE(rows[0].history.empty());
  EXPECT_EQ(rows[1].history, b->tokens);
  EXPECT_TRUE(rows[1].sampling.stop_ids.empty());
  EXPECT_EQ(rows[1].sampling.row.presence_penalty, 0.5f);
}

TEST_F(StepBuilderTest, NewRowCarriesItsConstraintAndTheOutputSoFar) {
  sampling_.bias_ids = {5};
  sampling_.bias_values = {-1.5f};
  sampling_.stop_ids = {9};
  sampling_.row.min_total_tokens = 4;
  Sequence* plain = add(3, 6);
  SamplingParams constrained = sampling_;
  constrained.constraint = std::string("a\0bcd", 5);  // not whole words
  constrained.row.presence_penalty = 0.5f;
  Sequence* a = make(5, 6);
  a->sampling = &constrained;
  scheduler().add(a);
  const PlanView plan(build());
  const std::vector<NewRow> rows = plan.new_rows();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].row, plain->row);
  EXPECT_TRUE(rows[0].sampling.constraint.empty());
  EXPECT_EQ(rows[0].sampling.stop_ids, sampling_.stop_ids);
  EXPECT_EQ(rows[1].sampling.constraint, constrained.constraint);
  EXPECT_TRUE(rows[1].sampling.stop_ids.empty());  // the constraint has them
  EXPECT_EQ(rows[1].history, a->tokens);
  EXPECT_TRUE(rows[1].output.empty());
  commit_tokens({1, 7});
  build();
  commit_tokens({1, 8});
  scheduler().recompute_all();
  const PlanView again(build());
  for (const NewRow& row : again.new_rows()) {
    const bool is_constrained = row.row == a->row;
    EXPECT_EQ(row.sampling.constraint.size(), is_constrained ? 5u : 0u);
    EXPECT_EQ(row.output, is_constrained ? std::vector<TokenId>({7, 8}) : std::vector<TokenId>());
  }
}

TEST_F(StepBuilderTest, MaxLogprobsCountsSampledRowsOnly) {
  config_.max_num_batched_tokens = 8;
  SamplingParams five;
  five.row.num_logprobs = 5;
  SamplingParams two;
  two.row.num_logprobs = 2;
  Sequence* a = make(3, 4);
  a->sampling = &two;
  Sequence* b = make(6, 4);  // one token short of its end
  b->sampling = &five;
  scheduler().add(a);
  scheduler().add(b);
  EXPECT_EQ(PlanView(build()).header().max_logprobs, 2);
  commit_tokens({1});
  EXPECT_EQ(PlanView(build()).header().max_logprobs, 5);
}

TEST_F(StepBuilderTest, PromptTokensThatAreScoredAndPooledPartsAreInTheWords) {
  config_.max_num_batched_tokens = 8;
  Sequence* a = make(3, 4);
  a->num_prompt_logprobs = 2;
  Sequence* b = make(7, 0);
  b->pooling = Pooling::kMean;
  Sequence* c = make(4, 0);
  c->pooling = Pooling::kLast;
  for (Sequence* s : {a, b, c}) scheduler().add(s);
  const auto scored_words = [](const PlanView& plan) {
    std::vector<Ints> words;
    for (const ScoredToken& token : plan.scored()) {
      words.push_back({token.index, token.token, token.count});
    }
    return words;
  };
  const PlanView first(build());  // a whole, five tokens of b
  EXPECT_EQ(scored_words(first), (std::vector<Ints>{{0, a->tokens[1], 2}, {1, a->tokens[2], 2}}));
  EXPECT_EQ(first.header().max_prompt_logprobs, 2);
  EXPECT_EQ(ints(first.logits_indices()), (Ints{2}));
  ASSERT_EQ(first.pooled().size(), 1u);
  EXPECT_EQ(first.pooled()[0].sequence, 1);
  EXPECT_EQ(first.pooled()[0].pooling, Pooling::kMean);
  EXPECT_FALSE(first.pooled()[0].ends);
  EXPECT_EQ(first.header().num_vectors, 0);
  a->score_begin = 2;
  commit_tokens({1});
  const PlanView second(build());  // a decode, what is left of b, c whole
  EXPECT_TRUE(second.scored().empty());
  EXPECT_EQ(ints(second.logits_indices()), (Ints{0}));
  ASSERT_EQ(second.pooled().size(), 2u);
  EXPECT_TRUE(second.pooled()[0].ends);
  EXPECT_EQ(second.pooled()[1].sequence, 2);
  EXPECT_EQ(second.pooled()[1].pooling, Pooling::kLast);
  EXPECT_TRUE(second.pooled()[1].ends);
  EXPECT_EQ(second.header().num_vectors, 2);
}

TEST_F(StepBuilderTest, DraftsComeBehindTheirSequencesTokensAndTheirLogitsInRounds) {
  config_.num_speculative_tokens = 4;
  Sequence* a = add(3, 8);
  Sequence* b = add(2, 8);
  build();
  commit_tokens({41, 42});
  a->drafts = {51, 52};
  b->drafts = {61};
  Sequence* c = add(2, 8);
  const PlanView plan(build());
  EXPECT_EQ(ints(plan.token_ids()), (Ints{41, 51, 52, 42, 61, c->tokens[0], 1}));
  EXPECT_EQ(ints(plan.positions()), (Ints{3, 4, 5, 2, 3, 0, 1}));
  EXPECT_EQ(ints(plan.query_start()), (Ints{0, 3, 5, 7}));
  EXPECT_EQ(ints(plan.seq_lens()), (Ints{6, 4, 2}));
  EXPECT_EQ(ints(plan.logits_indices()), (Ints{0, 3, 6, 1, 4, 2}));
  EXPECT_EQ(ints(plan.draft_rounds()), (Ints{2, 1}));
  const std::vector<BlockId>& blocks = a->block_table.blocks;
  EXPECT_EQ(plan.slot(0), 4 * blocks[0] + 3);
  EXPECT_EQ(plan.slot(1), 4 * blocks[1]);
  EXPECT_EQ(plan.slot(2), 4 * blocks[1] + 1);
  EXPECT_EQ(updates(plan),
            (std::vector<Ints>{{a->row, 1, blocks[1]}, {c->row, 0, c->block_table.blocks[0]}}));
  EXPECT_EQ(plan.header().num_logits, 6);
  EXPECT_EQ(plan.header().num_drafts, 3);
  EXPECT_EQ(plan.header().max_query_len, 3);
  EXPECT_EQ(plan.header().max_seq_len, 6);
  EXPECT_EQ(plan.header().num_placeholders, 0);
  commit_tokens({51, 43, 71, /* first drafts */ 53, 44, /* second */ 54});
  const PlanView next(build());
  EXPECT_EQ(ints(next.token_ids()), (Ints{53, 43, 71}));  // each the first that is not computed
  EXPECT_EQ(ints(next.positions()), (Ints{5, 3, 2}));
  EXPECT_TRUE(next.draft_rounds().empty());
  EXPECT_TRUE(updates(next).empty());  // a has its block already
}

TEST_F(StepBuilderTest, SectionsOfAStepWithDraftsAreWhereTheyAreWithout) {
  config_.num_speculative_tokens = 4;
  Sequence* drafter = add(3, 8);
  Sequence* gone = add(3, 8);
  build();
  commit_tokens({41, 42});
  const RowId gone_row = gone->row;
  scheduler().finish(gone);
  drafter->drafts = {51, 52};
  SamplingParams constrained;
  constrained.constraint = "abcde";
  Sequence* scored = make(3, 4);
  scored->num_prompt_logprobs = 1;
  scored->sampling = &constrained;
  Sequence* pooled = make(4, 0);
  pooled->pooling = Pooling::kMean;
  scheduler().add(scored);
  scheduler().add(pooled);
  const PlanView plan(build());
  EXPECT_EQ(ints(plan.freed_rows()), Ints{gone_row});
  ASSERT_EQ(plan.new_rows().size(), 2u);
  EXPECT_EQ(plan.new_rows()[0].sampling.constraint, "abcde");
  ASSERT_EQ(plan.scored().size(), 2u);  // behind one token and two drafts
  EXPECT_EQ(plan.scored()[0].index, 3);
  EXPECT_EQ(plan.scored()[1].index, 4);
  EXPECT_EQ(plan.scored()[1].token, scored->tokens[2]);
  ASSERT_EQ(plan.pooled().size(), 1u);
  EXPECT_EQ(plan.pooled()[0].sequence, 2);
  EXPECT_EQ(ints(plan.logits_indices()), (Ints{0, 5, 1, 2}));
  EXPECT_EQ(ints(plan.draft_rounds()), (Ints{1, 1}));
}

TEST_F(StepBuilderTest, CancelledStepWithDraftsIsSentAgain) {
  config_.num_speculative_tokens = 4;
  Sequence* s = add(3, 20);
  build();
  commit_tokens({41});
  s->drafts = {51, 52, 53, 54};
  const auto words = ints(build());
  const Ints drafts_alone = {s->row, 1, s->block_table.blocks[1]};
  EXPECT_EQ(updates(PlanView(words)), (std::vector<Ints>{drafts_alone}));
  scheduler().cancel_steps();
  const PlanView again(build());
  EXPECT_EQ(updates(again),
            (std::vector<Ints>{{s->row, 0, s->block_table.blocks[0]}, drafts_alone}));
  EXPECT_EQ(ints(again.token_ids()), ints(PlanView(words).token_ids()));
  commit_tokens({41, 51, 52, 53, 54});  // none is right, and their block is given back
  EXPECT_EQ(s->block_table.blocks.size(), 1u);
  const PlanView next(build());
  EXPECT_EQ(updates(next), (std::vector<Ints>{{s->row, 1, s->block_table.blocks[1]}}));
}

TEST_F(StepBuilderTest, CountsOfDraftsThatDoNotFitAreRefused) {
  config_.num_speculative_tokens = 4;
  Sequence* s[] = {add(3, 8), add(3, 8)};
  build();
  commit_tokens({41, 42});
  s[0]->drafts = {51, 52};
  s[1]->drafts = {61};
  const auto words = ints(build());
  EXPECT_NO_THROW(PlanView{words});
  const size_t num_words = words.size();  // the rounds are the last
  ASSERT_EQ((Ints{words[num_words - 2], words[num_words - 1]}), (Ints{2, 1}));
  constexpr size_t kNumDrafts = offsetof(PlanHeader, num_drafts) / sizeof(int32_t);
  constexpr size_t kNumRounds = offsetof(PlanHeader, num_draft_rounds) / sizeof(int32_t);
  const auto refuses = [&](size_t at, int32_t value) {
    Ints changed = words;
    changed[at] = value;
    EXPECT_THROW(PlanView{changed}, InternalError) << at << " is " << value;
  };
  for (const int32_t value : {-1, 0, 2, 4, 5, 6, std::numeric_limits<int32_t>::max(),
                              std::numeric_limits<int32_t>::min()}) {
    refuses(kNumDrafts, value);
  }
  for (const int32_t value : {-1, 0, 1, 3, std::numeric_limits<int32_t>::max()}) {
    refuses(kNumRounds, value);
  }
  for (const int32_t value : {-1, 0, 1, 3}) refuses(num_words - 2, value);
  for (const int32_t value : {-1, 0, 2, 3}) refuses(num_words - 1, value);
}

TEST_F(StepBuilderTest, CopiesAndFreedRowsAreInTheWords) {
  Sequence* parent = add(6, 4);
  Sequence* fork = add_fork(parent);
  Sequence* gone = add(4, 4);
  build();
  commit_tokens({1, 2});
  const RowId gone_row = gone->row;
  scheduler().finish(gone);
  const PlanView plan(build());
  EXPECT_EQ(ints(plan.copies()),
            (Ints{parent->block_table.blocks[1], fork->block_table.blocks[1]}));
  EXPECT_EQ(ints(plan.freed_rows()), (Ints{gone_row}));
  EXPECT_EQ(fork->row, gone_row);  // used again in the step that frees it
}

TEST_F(StepBuilderTest, SlotsBeyondThirtyTwoBitsAreRight) {
  Sequence s;
  s.tokens = {1, 2, 3};
  s.num_prompt_tokens = 2;
  s.row = 0;
  s.block_table.blocks = {0x7ffffff0};
  s.num_blocks_sent = 1;
  s.sampling = &sampling_;
  const ScheduledSequence part{&s, 2, 1, true, false};
  Step step;
  step.sequences = {&part, 1};
  step.num_tokens = step.num_samples = 1;
  StepBuilder builder(config_, 16);
  EXPECT_EQ(PlanView(builder.build(step, 1)).slot(0), int64_t{0x7ffffff0} * 16 + 2);
}

TEST_F(StepBuilderTest, EntriesThatTheWindowPassedBeforeAdmissionAreNotSent) {
  cache_config_.enable_prefix_caching = true;
  cache_config_.sliding_window = 4;
  Sequence* a = make(33, 1, 5);
  scheduler().add(a);
  run_until_idle();
  Sequence* b = make(33, 1, 5);
  scheduler().add(b);
  const PlanView plan(build());
  ASSERT_EQ(b->num_cached_tokens, 32);
  ASSERT_GT(b->block_table.num_out_of_window, 0);
  EXPECT_EQ(updates(plan).size(), 9u - static_cast<size_t>(b->block_table.num_out_of_window));
  for (const Ints& update : updates(plan)) EXPECT_GE(update[2], 0);
}

}  // namespace
}  // namespace vllm_lite
