// Groups of beams: who shares what, and that they wait, run and end together.
#include <set>
#include <string>

#include "scheduler/plan_view.h"
#include "scheduler/step_builder.h"
#include "scheduler_fixture.h"

namespace vllm_lite {
namespace {

class BeamsTest : public SchedulerTest {
 protected:
  BeamsTest() { config_.max_num_seqs = 6; }

  BeamGroup& add_group(int32_t width, int32_t prompt, int32_t output) {
    BeamGroup& group = make_group(width, prompt, output);
    EXPECT_EQ(scheduler().add(group.first), AddResult::kAdded);
    scheduler().check_invariants();
    return group;
  }
  BeamGroup& make_group(int32_t width, int32_t prompt, int32_t output) {
    BeamGroup& group = *groups_.emplace_back(std::make_unique<BeamGroup>());
    for (int32_t i = 0; i < width; ++i) {
      Sequence* s = make(prompt, output);
      s->group = &group;
      group.beams.push_back(s);
    }
    group.first = group.beams.front();
    return group;
  }
  // A step in which everybody samples, after which the group goes on as said.
  void step_and_set(BeamGroup& group, const std::vector<Scheduler::NextBeam>& next) {
    commit(plan());
    scheduler().set_beams(group, next);
    scheduler().check_invariants();
  }
  static std::vector<BlockId> blocks(const Sequence* s) { return s->block_table.blocks; }
  static std::vector<std::pair<BlockId, BlockId>> copies(const Step& step) {
    std::vector<std::pair<BlockId, BlockId>> pairs;
    for (const BlockCopy& copy : step.copies) pairs.emplace_back(copy.source, copy.destination);
    return pairs;
  }

  std::vector<std::unique_ptr<BeamGroup>> groups_;
};

TEST_F(BeamsTest, TheFirstToGoOnKeepsItsBlocksAndTheOthersCopyThePartlyFilledOneAlone) {
  BeamGroup& group = add_group(3, 10, 8);  // blocks of 4: two whole, one with 2 tokens
  step_and_set(group, {{0, 50}, {0, 51}, {0, 52}});
  EXPECT_EQ(cache_->num_used_blocks(), 3);
  const Step& step = plan();
  EXPECT_EQ(step.sequences.size(), 3u);
  EXPECT_EQ(cache_->num_used_blocks(), 5);
  const auto first = blocks(group.beams[0]);
  std::set<BlockId> last = {first[2]};
  for (int32_t i = 1; i < 3; ++i) {
    const auto own = blocks(group.beams[static_cast<size_t>(i)]);
    ASSERT_EQ(own.size(), 3u);
    EXPECT_EQ(own[0], first[0]);
    EXPECT_EQ(own[1], first[1]);
    EXPECT_TRUE(last.insert(own[2]).second);
    EXPECT_EQ(copies(step)[static_cast<size_t>(i) - 1], std::pair(first[2], own[2]));
  }
}

TEST_F(BeamsTest, NothingIsCopiedWhereEachBeamGoesOnAsItIs) {
  BeamGroup& group = add_group(2, 10, 12);
  step_and_set(group, {{0, 50}, {0, 51}});
  step_and_set(group, {{1, 60}, {0, 61}});  // the other is better now
  const Step& step = plan();
  EXPECT_TRUE(step.copies.empty());
  EXPECT_EQ(group.beams[0]->tokens.back(), 60);
  EXPECT_EQ(group.beams[0]->tokens[10], 51);
  EXPECT_EQ(step.sequences[0].sequence, group.beams[0]);
}

TEST_F(BeamsTest, NothingIsCopiedAtTheEndOfABlock) {
  BeamGroup& group = add_group(3, 8, 8);
  step_and_set(group, {{0, 50}, {0, 51}, {0, 52}});
  EXPECT_TRUE(plan().copies.empty());
  EXPECT_EQ(cache_->num_used_blocks(), 2 + 3);
}

TEST_F(BeamsTest, ABeamThatDoesNotGoOnGivesBackWhatItAloneHeld) {
  BeamGroup& group = add_group(3, 10, 8);
  step_and_set(group, {{0, 50}, {0, 51}, {0, 52}});
  step_and_set(group, {{1, 60}});
  EXPECT_EQ(cache_->num_used_blocks(), 3);
  EXPECT_EQ(group.num_in_use, 1);
  EXPECT_EQ(plan().sequences.size(), 1u);
  EXPECT_EQ(group.beams[0]->tokens[10], 51);
}

TEST_F(BeamsTest, TheWorkerIsToldOnlyWhatChangesInATable) {
  StepBuilder builder(config_, cache_config_.block_size);
  BeamGroup& group = add_group(2, 10, 12);
  uint64_t id = 0;
  const auto next_plan = [&] {
    const auto words = builder.build(plan(), ++id);
    return std::vector<int32_t>(words.begin(), words.end());
  };
  const auto next_step = [&](const std::vector<Scheduler::NextBeam>& next) {
    const std::vector<int32_t> words = next_plan();
    scheduler().commit(std::vector<TokenId>(static_cast<size_t>(group.num_in_use), 7));
    scheduler().set_beams(group, next);
    return words;
  };
  next_step({{0, 50}, {0, 51}});
  // The second beam's row is new, with its whole table.
  const std::vector<int32_t> second = next_step({{0, 60}, {0, 61}});
  EXPECT_EQ(PlanView(second).new_rows().size(), 1u);
  EXPECT_EQ(PlanView(second).header().num_table_updates, 3);
  // What it shares with the first from the beginning it has.
  const std::vector<int32_t> third = next_step({{0, 70}, {1, 71}});
  EXPECT_EQ(PlanView(third).new_rows().size(), 0u);
  ASSERT_EQ(PlanView(third).header().num_table_updates, 1);
  EXPECT_EQ(PlanView(third).table_update(0).index, 2);
  EXPECT_EQ(PlanView(third).table_update(0).row, group.beams[1]->row);
}

TEST_F(BeamsTest, ALackOfRoomPreemptsTheWholeGroupWhichBeginsAgain) {
  cache_config_.num_blocks = 12;
  config_.max_model_len = 40;
  Sequence* older = add(20, 18);
  BeamGroup& group = add_group(3, 9, 8);
  step_and_set(group, {{0, 50}, {0, 51}, {0, 52}});
  while (group.first->state == SequenceState::kRunning) {
    const Step& step = plan();
    if (group.first->state != SequenceState::kRunning) {
      EXPECT_EQ(step.sequences.size(), 1u);
      commit(step);
      break;
    }
    commit(step);
    scheduler().set_beams(group, std::vector<Scheduler::NextBeam>{{0, 50}, {1, 51}, {2, 52}});
    if (group.beams[0]->num_tokens() == group.first->max_total_tokens) FAIL() << "not preempted";
  }
  EXPECT_EQ(group.first->num_tokens(), 9);
  EXPECT_EQ(group.num_in_use, 1);
  EXPECT_EQ(group.first->num_preemptions, 1);
  for (const Sequence* beam : group.beams) EXPECT_TRUE(beam->block_table.blocks.empty());
  scheduler().finish(older);
  EXPECT_EQ(tokens_of(plan(), group.first), 9);
}

TEST_F(BeamsTest, AFailedStepPutsTheWholeGroupBack) {
  BeamGroup& group = add_group(3, 9, 8);
  step_and_set(group, {{0, 50}, {0, 51}, {0, 52}});
  plan();
  scheduler().cancel_steps();
  scheduler().check_invariants();
  EXPECT_EQ(cache_->num_used_blocks(), 0);
  EXPECT_EQ(group.first->num_tokens(), 9);
  const Step& step = plan();
  EXPECT_EQ(tokens_of(step, group.first), 9);
  EXPECT_EQ(freed(step).size(), 3u);
}

TEST_F(BeamsTest, AWorkerThatStartsAnewIsToldEverythingAgain) {
  BeamGroup& group = add_group(2, 9, 8);
  step_and_set(group, {{0, 50}, {0, 51}});
  scheduler().recompute_all();
  scheduler().check_invariants();
  EXPECT_EQ(tokens_of(plan(), group.first), 9);
}

TEST_F(BeamsTest, FinishBetweenTwoStepsGivesEverythingBack) {
  BeamGroup& group = add_group(3, 10, 8);
  step_and_set(group, {{0, 50}, {0, 51}, {0, 52}});
  scheduler().finish(group.first);
  scheduler().check_invariants();
  EXPECT_EQ(cache_->num_used_blocks(), 0);
  for (const Sequence* beam : group.beams) EXPECT_EQ(beam->state, SequenceState::kFinished);
  EXPECT_EQ(add(3, 2)->state, SequenceState::kWaiting);
  EXPECT_EQ(freed(plan()).size(), 3u);
}

TEST_F(BeamsTest, AGroupWaitsUntilThereAreRowsForAllItsBeams) {
  for (int32_t i = 0; i < 4; ++i) add(3, 20);
  BeamGroup& group = add_group(3, 3, 10);
  Sequence* behind = add(3, 5);
  const Step& step = plan();
  EXPECT_EQ(group.first->state, SequenceState::kWaiting);
  EXPECT_EQ(tokens_of(step, behind), 3);  // past it, as past one for which there is no room
}

TEST_F(BeamsTest, WhatCanNeverRunIsRefused) {
  const auto refused = [&](int32_t width, int32_t prompt, int32_t output) {
    return error_of([&] { scheduler().add(make_group(width, prompt, output).first); });
  };
  EXPECT_NE(refused(7, 3, 3).find("only 6 sequences may run"), std::string::npos);
  EXPECT_NE(refused(4, 9, 15).find("take up to 18 blocks of the KV cache, which has 16"),
            std::string::npos);
  EXPECT_EQ(refused(3, 9, 15), "no error");  // 2 + 3 * 4
}

}  // namespace
}  // namespace vllm_lite
