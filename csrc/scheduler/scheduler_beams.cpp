// The scheduler's part of a beam search (see "Beams" in scheduler.h).
#include <algorithm>
#include <string>

#include "core/check.h"
#include "scheduler/scheduler.h"

namespace vllm_lite {

// Serves all beams of a running group. Room for all is made first, so that each fork and each
// growth succeeds and no copy of this step is undone. False if the group was preempted, being the
// last.
bool Scheduler::schedule_beams(BeamGroup& group, int32_t& budget, int32_t& num_decodes,
                               bool& preempted) {
  num_decodes -= group.first->num_decoding();
  const Sequence& front = *group.beams.front();
  const int32_t remaining = front.num_remaining();
  const int32_t num_tokens = std::min({remaining, max_chunk(), budget - num_decodes});
  if (num_tokens <= 0) return true;
  const int32_t num_planned = front.num_planned;
  const int32_t needed = cache_.blocks_for(num_planned + num_tokens);
  const std::span<Sequence* const> beams(group.beams.data(), static_cast<size_t>(group.num_in_use));
  int32_t num_new = 0;
  for (const Sequence* beam : beams) {
    const auto num_held = beam->fork_parent != nullptr
                              ? num_planned / block_size_
                              : static_cast<int32_t>(beam->block_table.blocks.size());
    num_new += std::max(0, needed - num_held);
  }
  while (cache_.num_available_blocks() < num_new) {
    Sequence* victim = running_.back();
    preempted = true;
    if (victim == group.first) {
      VL_ASSERT(running_.size() > 1);  // alone it has the whole pool: see check_fits
      preempt(victim);
      return false;
    }
    num_decodes -= victim->num_decoding();
    preempt(victim);
  }
  for (Sequence* beam : beams) {
    if (beam->fork_parent != nullptr) {
      const bool forked = cache_.fork(beam->fork_parent->block_table, beam->block_table,
                                      num_planned, planned_->copies);
      VL_ASSERT(forked);
      beam->fork_parent = nullptr;
    }
    const bool grown = cache_.grow(beam->block_table, num_planned + num_tokens);
    VL_ASSERT(grown);
    schedule(beam, num_tokens, remaining, beam->num_blocks_sent < 0);
    budget -= num_tokens;
  }
  return true;
}

void Scheduler::set_beams(BeamGroup& group, std::span<const NextBeam> next) {
  VL_ASSERT(group.first->state == SequenceState::kRunning && !in_flight(group.first));
  VL_ASSERT(!next.empty() && next.size() <= group.beams.size());
  const size_t num_next = next.size();
  group.next.assign(group.beams.size(), nullptr);
  // Who goes on as it is, is its own fork_parent until the end.
  for (size_t i = 0; i < num_next; ++i) {
    VL_ASSERT(next[i].parent >= 0 && next[i].parent < group.num_in_use);
    Sequence* parent = group.beams[static_cast<size_t>(next[i].parent)];
    VL_ASSERT(parent->num_computed == parent->num_tokens());
    if (parent->fork_parent == parent) continue;
    parent->fork_parent = group.next[i] = parent;
  }
  size_t place = 0;  // the next one that is still empty
  for (Sequence* beam : group.beams) {
    if (beam->fork_parent == beam) continue;
    while (group.next[place] != nullptr) ++place;
    group.next[place] = beam;
    const bool is_used = place < num_next;
    replace_beam(beam, is_used ? group.beams[static_cast<size_t>(next[place].parent)] : nullptr);
  }
  for (size_t i = 0; i < num_next; ++i) {
    Sequence& beam = *group.next[i];
    if (beam.fork_parent == &beam) beam.fork_parent = nullptr;
    beam.tokens.push_back(next[i].token);
  }
  group.beams.swap(group.next);
  group.num_in_use = static_cast<int32_t>(num_next);
}

// A beam that does not go on gives its blocks back. It becomes what `parent` is, whose blocks it
// shares from the next plan on; without a parent it is not in use.
void Scheduler::replace_beam(Sequence* beam, Sequence* parent) {
  Sequence& s = *beam;
  int32_t num_known = 0;  // leading entries of the table to come that the worker has
  if (parent != nullptr) {
    const auto num_shared = static_cast<size_t>(parent->num_computed / block_size_);
    const auto& own = s.block_table.blocks;
    const auto& theirs = parent->block_table.blocks;
    const size_t num_compared = std::min(num_shared, own.size());
    while (static_cast<size_t>(num_known) < num_compared &&
           own[static_cast<size_t>(num_known)] == theirs[static_cast<size_t>(num_known)]) {
      ++num_known;
    }
    num_known = std::max(num_known, parent->block_table.num_out_of_window);
    s.tokens = parent->tokens;
  }
  if (s.num_blocks_sent >= 0) s.num_blocks_sent = num_known;
  cache_.release(s.block_table);
  if (parent == nullptr) s.tokens.clear();
  s.num_computed = s.num_planned = parent == nullptr ? 0 : parent->num_computed;
  s.fork_parent = parent;
}

// One beam in use again, the first, with its prompt alone.
void Scheduler::restart(BeamGroup& group) {
  std::swap(*std::find(group.beams.begin(), group.beams.end(), group.first), group.beams.front());
  group.num_in_use = 1;
  for (Sequence* beam : group.beams) {
    beam->fork_parent = nullptr;
    beam->num_computed = beam->num_planned = 0;
    if (beam == group.first) {
      beam->tokens.resize(static_cast<size_t>(beam->num_prompt_tokens));
    } else {
      beam->state = SequenceState::kBeam;
      beam->tokens.clear();
    }
  }
}

void Scheduler::check_fits(const BeamGroup& group) const {
  const Sequence& first = *group.first;
  const std::string width = std::to_string(group.width());
  VL_CHECK(
      group.width() <= max_running_,
      "n is " + width + ", and the beams of a search run together, but only " +
          std::to_string(max_running_) +
          " sequences may run: ask for fewer or raise max_num_seqs and max_num_batched_tokens");
  const int64_t num_shared = first.num_prompt_tokens / block_size_;
  const int64_t num_own = cache_.blocks_for(first.max_total_tokens) - num_shared;
  const int64_t num_needed = num_shared + group.width() * num_own;
  VL_CHECK(num_needed <= cache_.num_blocks(),
           "n is " + width + ": so many beams of up to " + std::to_string(first.max_total_tokens) +
               " tokens take up to " + std::to_string(num_needed) +
               " blocks of the KV cache, which has " + std::to_string(cache_.num_blocks()) +
               ": ask for fewer beams or tokens, or give the KV cache more memory");
}

void Scheduler::commit_beam(const ScheduledSequence& part, TokenId token) {
  Sequence& s = *part.sequence;
  // Else it was preempted since, and begins again.
  if (s.group->first->state != SequenceState::kRunning) return;
  if (part.samples && token == kNoToken) {
    s.num_planned = s.num_computed;
    return;
  }
  s.num_computed = part.first_token + part.num_tokens;
  cache_.mark_computed(s.block_table, s.tokens, s.salt, s.num_computed);
}

// That it is all in one place, and its beams in step.
void Scheduler::check_group(const BeamGroup& group) const {
  const bool runs = group.first->state == SequenceState::kRunning;
  const Sequence& front = *group.beams.front();
  VL_ASSERT(group.num_in_use >= 1 && group.num_in_use <= group.width());
  VL_ASSERT(runs || (group.num_in_use == 1 && group.first == &front));
  VL_ASSERT(std::count(group.beams.begin(), group.beams.end(), group.first) == 1);
  VL_ASSERT(front.num_tokens() >= front.num_prompt_tokens &&
            front.num_tokens() <= front.max_total_tokens);
  for (int32_t i = 0; i < group.width(); ++i) {
    const Sequence& s = *group.beams[static_cast<size_t>(i)];
    VL_ASSERT(s.group == &group && s.forks == nullptr && s.num_pending == 0);
    VL_ASSERT(&s == group.first || (s.state == SequenceState::kBeam && !s.hook.linked()));
    VL_ASSERT((s.row >= 0) == runs);
    if (i >= group.num_in_use || !runs) {
      VL_ASSERT(s.block_table.blocks.empty() && s.fork_parent == nullptr);
      VL_ASSERT(s.tokens.empty() || &s == &front);
      continue;
    }
    VL_ASSERT(s.num_tokens() == front.num_tokens() && s.num_computed == front.num_computed);
    VL_ASSERT(s.num_planned == front.num_planned && s.num_computed <= s.num_planned);
    VL_ASSERT(s.num_planned <= s.num_tokens());
    VL_ASSERT(s.num_planned == s.num_computed || in_flight(&s));
    const auto capacity = static_cast<int64_t>(s.block_table.blocks.size()) * block_size_;
    if (const Sequence* parent = s.fork_parent) {
      VL_ASSERT(capacity == 0 && parent->group == &group && parent->fork_parent == nullptr);
      VL_ASSERT(parent->num_computed == s.num_computed);
      VL_ASSERT(std::equal(s.tokens.begin(), s.tokens.end() - 1, parent->tokens.begin()));
    } else {
      VL_ASSERT(capacity >= s.num_planned);
    }
  }
}

}  // namespace vllm_lite
