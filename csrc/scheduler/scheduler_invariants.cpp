#include <algorithm>

#include "core/check.h"
#include "scheduler/scheduler.h"

namespace vllm_lite {

void Scheduler::check_invariants() const {
  std::vector<const BlockTable*> tables;
  std::vector<bool> row_taken(free_rows_.capacity(), false);
  const auto take_row = [&](RowId row) {
    VL_ASSERT(row >= 0 && row < config_.max_num_seqs && !row_taken[static_cast<size_t>(row)]);
    row_taken[static_cast<size_t>(row)] = true;
  };
  int32_t num_parked = 0;
  const auto check_forks = [&](const Sequence& parent) {
    const Sequence* previous = nullptr;
    for (const Sequence* s = parent.forks; s != nullptr; previous = s, s = s->next_fork) {
      VL_ASSERT(s->fork_parent == &parent && s->prev_fork == previous);
      VL_ASSERT(s->state == SequenceState::kWaiting);
      if (s->hook.linked()) continue;
      ++num_parked;
      VL_ASSERT(s->awaits_parent() && s->row == -1 && s->block_table.blocks.empty());
    }
  };

  // num_planned and num_pending are what the parts in flight add to what is committed.
  const auto check_planned = [&](const Sequence& s) {
    int32_t num_planned = s.num_computed;
    int32_t num_pending = 0;
    for (int32_t i = 0; i < num_in_flight_; ++i) {
      for (const ScheduledSequence& part : steps_[index_of_step(i)].sequences) {
        if (part.sequence != &s) continue;
        num_pending += part.samples;
        VL_ASSERT(part.num_drafts == 0 || num_in_flight_ == 1);
        if (s.state != SequenceState::kRunning) continue;  // preempted since
        VL_ASSERT(part.first_token == num_planned);
        num_planned += part.num_tokens;
      }
    }
    VL_ASSERT(s.num_planned == num_planned && s.num_pending == num_pending);
    VL_ASSERT(num_planned < s.num_tokens() + num_pending + s.samples_nothing());
    VL_ASSERT(s.num_tokens() + num_pending <= s.max_total_tokens);
    VL_ASSERT(num_pending == 0 || in_flight(&s));
  };

  int32_t num_groups = 0;
  const Sequence* previous = nullptr;
  for (const Sequence* s = running_.front(); s != nullptr; s = running_.next(s)) {
    VL_ASSERT(s->state == SequenceState::kRunning);
    VL_ASSERT(previous == nullptr || running_.before(*previous, *s));
    previous = s;
    if (s->group != nullptr) {
      VL_ASSERT(s->group->first == s);
      ++num_groups;
      check_group(*s->group);
      for (const Sequence* beam : s->group->beams) {
        take_row(beam->row);
        tables.push_back(&beam->block_table);
      }
      continue;
    }
    VL_ASSERT(s->fork_parent == nullptr);
    VL_ASSERT(s->num_computed >= 0 && s->num_computed < s->num_tokens());
    VL_ASSERT(static_cast<int64_t>(s->block_table.blocks.size()) * block_size_ >=
              std::max(s->num_planned, s->num_prompt_tokens));
    check_planned(*s);
    take_row(s->row);
    tables.push_back(&s->block_table);
    check_forks(*s);
  }
  previous = nullptr;
  for (const Sequence* s = waiting_.front(); s != nullptr; s = waiting_.next(s)) {
    VL_ASSERT(s->state == SequenceState::kWaiting);
    VL_ASSERT(previous == nullptr || waiting_.before(*previous, *s));
    VL_ASSERT(s->row == -1 && s->block_table.blocks.empty() && s->num_computed == 0);
    if (s->group != nullptr) {
      ++num_groups;
      check_group(*s->group);
    } else {
      check_planned(*s);
    }
    check_forks(*s);
    previous = s;
  }
  VL_ASSERT(num_parked == num_parked_ && num_groups == num_groups_);
  VL_ASSERT(running_.size() <= num_rows_in_use() && num_rows_in_use() <= max_running_);
  VL_ASSERT(num_in_flight_ >= 0 && num_in_flight_ <= kMaxStepsInFlight);
  for (int32_t i = 0; i < num_in_flight_; ++i) {
    VL_ASSERT(steps_[index_of_step(i)].number >
              (i == 0 ? last_ended_ : steps_[index_of_step(i - 1)].number));
    for (const ScheduledSequence& part : steps_[index_of_step(i)].sequences) {
      VL_ASSERT(in_flight(part.sequence));
      VL_ASSERT(part.sequence->group == nullptr || in_flight(part.sequence->group->first));
      if (part.sequence->state != SequenceState::kFinished) continue;
      VL_ASSERT(part.sequence->row == -1 && part.sequence->block_table.blocks.empty());
    }
  }
  for (RowId row : free_rows_) take_row(row);
  VL_ASSERT(std::find(row_taken.begin(), row_taken.end(), false) == row_taken.end());
  VL_ASSERT(static_cast<size_t>(std::count(row_unreported_.begin(), row_unreported_.end(), true)) ==
            unreported_rows_.size());
  cache_.check_invariants(tables);
}

}  // namespace vllm_lite
