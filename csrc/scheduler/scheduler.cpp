#include "scheduler/scheduler.h"

#include <algorithm>
#include <string>

#include "core/check.h"

namespace vllm_lite {
namespace {

void check_at_least(const char* field, int32_t value, int32_t minimum) {
  VL_CHECK(value >= minimum, std::string(field) + " is " + std::to_string(value) +
                                 ", but must be at least " + std::to_string(minimum));
}

// Tokens that are left to compute after the steps in flight. The last token that the limit allows
// is never computed: it is sampled, and the sequence ends.
int32_t num_remaining(const Sequence& sequence) {
  const int32_t num_tokens = sequence.num_tokens() + sequence.num_pending;
  if (num_tokens < sequence.max_total_tokens || sequence.samples_nothing()) {
    return num_tokens - sequence.num_planned;
  }
  return 0;
}

// Tokens that a prefix hit may spare: not those whose hidden states are wanted.
int32_t max_hit_tokens(const Sequence& sequence) {
  if (sequence.pooling == Pooling::kMean) return 0;
  const bool lacks_scores =
      sequence.is_scored() && sequence.score_begin < sequence.num_prompt_tokens - 1;
  return lacks_scores ? sequence.score_begin : sequence.num_tokens();
}

// Rows that the sequence, or the group that it stands for, has while it runs.
int32_t num_rows(const Sequence& sequence) {
  return sequence.group == nullptr ? 1 : sequence.group->width();
}

// Of these, those that have one token to compute.
int32_t num_decoding(const Sequence& sequence) {
  if (sequence.group == nullptr) return num_remaining(sequence) == 1;
  const BeamGroup& group = *sequence.group;
  return num_remaining(*group.beams.front()) == 1 ? group.num_in_use : 0;
}

// The parent is computing the prompt that this sample will fork.
bool awaits_parent(const Sequence& sequence) {
  const Sequence* parent = sequence.fork_parent;
  return parent != nullptr && parent->state == SequenceState::kRunning &&
         parent->num_computed < sequence.num_prompt_tokens;
}

// REQUIRES: !awaits_parent(sequence).
bool can_fork(const Sequence& sequence) {
  const Sequence* parent = sequence.fork_parent;
  return parent != nullptr && parent->state == SequenceState::kRunning &&
         sequence.num_prompt_tokens > 1;
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, KvCacheManager& cache)
    : config_(config),
      cache_(cache),
      block_size_(cache.block_size()),
      max_running_(std::min(config.max_num_seqs, config.max_num_batched_tokens)),
      max_headroom_(std::max(1, cache.num_blocks() / 16)),
      running_(config.policy == SchedulingPolicy::kPriority),
      waiting_(config.policy == SchedulingPolicy::kPriority) {
  check_at_least("max_num_seqs", config.max_num_seqs, 1);
  check_at_least("max_num_batched_tokens", config.max_num_batched_tokens, 1);
  check_at_least("max_model_len", config.max_model_len, 1);
  check_at_least("max_num_waiting", config.max_num_waiting, 1);
  check_at_least("max_chunk_tokens", config.max_chunk_tokens, 0);
  check_at_least("look_past", config.look_past, 0);
  check_at_least("max_passed_over", config.max_passed_over, 0);
  check_at_least("min_awaited_tokens", config.min_awaited_tokens, 0);
  VL_CHECK(config.num_speculative_tokens >= 0 && config.num_speculative_tokens <= kMaxDrafts,
           "num_speculative_tokens is " + std::to_string(config.num_speculative_tokens) +
               ", but must be from 0 to " + std::to_string(kMaxDrafts));
  VL_CHECK(config.max_num_logits == 0 || config.max_num_logits >= config.max_num_seqs,
           "max_num_logits is " + std::to_string(config.max_num_logits) +
               ", but must be 0, for no limit, or at least max_num_seqs, which is " +
               std::to_string(config.max_num_seqs));
  const int64_t capacity = int64_t{cache.num_blocks()} * cache.block_size();
  VL_CHECK(config.max_model_len <= capacity,
           "max_model_len is " + std::to_string(config.max_model_len) + ", but the KV cache of " +
               std::to_string(cache.num_blocks()) + " blocks of " +
               std::to_string(cache.block_size()) + " tokens holds " + std::to_string(capacity) +
               " tokens: set max_model_len to at most " + std::to_string(capacity) +
               " or give the KV cache more memory");

  const auto num_rows = static_cast<size_t>(config.max_num_seqs);
  for (PlannedStep& planned : steps_) {
    planned.sequences.reserve(num_rows);
    planned.copies.reserve(num_rows);
    planned.freed_rows.reserve(num_rows);
    planned.draft_rounds.reserve(kMaxDrafts);
  }
  unreported_rows_.reserve(num_rows);
  row_unreported_.assign(num_rows, false);
  blocked_.reserve(static_cast<size_t>(config.look_past) + 1);
  free_rows_.reserve(num_rows);
  for (RowId row = config.max_num_seqs - 1; row >= 0; --row) free_rows_.push_back(row);
}

AddResult Scheduler::add(Sequence* sequence) {
  Sequence& s = *sequence;
  VL_ASSERT(s.state == SequenceState::kNew);
  const std::string limit = std::to_string(config_.max_model_len);
  VL_CHECK(s.num_prompt_tokens >= 1 && s.num_prompt_tokens <= s.num_tokens(),
           "the prompt has no tokens: it must have at least one");
  VL_CHECK(s.num_prompt_tokens < config_.max_model_len,
           "the prompt has " + std::to_string(s.num_prompt_tokens) +
               " tokens, but must be shorter than max_model_len, which is " + limit +
               ": shorten the prompt");
  const bool has_room = s.samples_nothing() ? s.num_tokens() == s.max_total_tokens
                                            : s.num_tokens() < s.max_total_tokens;
  VL_CHECK(has_room && s.max_total_tokens <= config_.max_model_len,
           "prompt and output may have " + std::to_string(s.max_total_tokens) +
               " tokens in all, but the limit must be above the " + std::to_string(s.num_tokens()) +
               " tokens given and at most max_model_len, which is " + limit +
               ": change max_tokens or shorten the prompt");
  if (s.group != nullptr) check_fits(*s.group);
  if (waiting_.size() + num_parked_ >= config_.max_num_waiting) return AddResult::kQueueFull;

  s.state = SequenceState::kWaiting;
  s.arrival = next_arrival_++;
  if (s.group != nullptr) {
    restart(*s.group);
    ++num_groups_;
  }
  if (Sequence* parent = s.fork_parent) {
    if (parent->state == SequenceState::kWaiting || parent->state == SequenceState::kRunning) {
      s.prev_fork = nullptr;
      s.next_fork = parent->forks;
      if (parent->forks != nullptr) parent->forks->prev_fork = sequence;
      parent->forks = sequence;
    } else {
      s.fork_parent = nullptr;
    }
  }
  waiting_.insert(sequence);
  return AddResult::kAdded;
}

void Scheduler::finish(Sequence* sequence) {
  Sequence& s = *sequence;
  VL_ASSERT(s.state == SequenceState::kWaiting || s.state == SequenceState::kRunning);
  const bool was_running = s.state == SequenceState::kRunning;
  s.state = SequenceState::kFinished;
  unpark_forks(s);
  while (s.forks != nullptr) detach_fork(s.forks);
  detach_fork(sequence);
  if (was_running) {
    running_.erase(sequence);
    give_back(sequence);
  } else if (s.hook.linked()) {
    waiting_.erase(sequence);
  } else {
    --num_parked_;
  }
  if (s.group == nullptr) return;
  for (Sequence* beam : s.group->beams) beam->state = SequenceState::kFinished;
  --num_groups_;
}

const Step& Scheduler::step_in_flight(int32_t i) const {
  VL_ASSERT(i >= 0 && i < num_in_flight_);
  return steps_[index_of_step(i)].step;
}

const Step& Scheduler::plan() {
  VL_ASSERT(num_in_flight_ < kMaxStepsInFlight);
  PlannedStep& planned = steps_[index_of_step(num_in_flight_)];
  planned_ = &planned;
  planned.sequences.clear();
  planned.copies.clear();
  planned.freed_rows.clear();
  planned.draft_rounds.clear();
  planned.step = Step{};
  planned.number = ++step_number_;

  int32_t budget = config_.max_num_batched_tokens;
  const bool preempted = schedule_running(budget);
  if (!preempted) admit_waiting(budget);
  if (planned.sequences.empty()) return planned.step;

  // Nothing fails from here on.
  const bool has_groups = num_groups_ > 0;
  for (ScheduledSequence& part : planned.sequences) {
    part.sequence->last_step = step_number_;
    part.sequence->num_planned += part.num_tokens;
    planned.step.num_samples += part.samples;
    if (has_groups && part.sequence->group != nullptr) {
      part.sequence->group->first->last_step = step_number_;
    } else {
      part.sequence->num_pending += part.samples;
    }
    if (part.sequence->is_scored() || part.sequence->samples_nothing()) plan_scores(part);
  }

  if (config_.num_speculative_tokens > 0) plan_drafts(budget);

  // An empty step is not sent, so freed rows are reported by the first one that is not.
  planned.freed_rows.swap(unreported_rows_);
  for (RowId row : planned.freed_rows) row_unreported_[static_cast<size_t>(row)] = false;
  planned.step.num_tokens = config_.max_num_batched_tokens - budget;
  planned.step.sequences = planned.sequences;
  planned.step.freed_rows = planned.freed_rows;
  planned.step.copies = planned.copies;
  planned.step.draft_rounds = planned.draft_rounds;
  ++num_in_flight_;
  return planned.step;
}

// Inlined: a call for each sequence is a tenth of a step.
[[gnu::always_inline]] inline void Scheduler::schedule(Sequence* sequence, int32_t num_tokens,
                                                       int32_t remaining, bool new_row) {
  const bool samples = num_tokens == remaining && !sequence->samples_nothing();
  planned_->sequences.emplace_back(sequence, sequence->num_planned, num_tokens, samples, new_row);
}

// What the worker is to give of a part's hidden states beside the token that is sampled.
void Scheduler::plan_scores(ScheduledSequence& part) {
  const Sequence& s = *part.sequence;
  Step& step = planned_->step;
  const int32_t end = part.first_token + part.num_tokens;
  if (s.is_scored()) {
    part.first_scored = std::max(part.first_token, s.score_begin);
    part.num_scored = std::max(0, std::min(end, s.num_prompt_tokens - 1) - part.first_scored);
    step.num_scored += part.num_scored;
  }
  if (s.pooling == Pooling::kNone) return;
  step.num_vectors += part.ends_prompt();
  step.num_pooled += part.ends_prompt() || s.pooling == Pooling::kMean;
}

// Drafts for the parts that sample, while tokens, logits and blocks last.
void Scheduler::plan_drafts(int32_t& budget) {
  Step& step = planned_->step;
  int32_t left = budget;
  if (config_.max_num_logits > 0) left = std::min(left, config_.max_num_logits - step.num_samples);
  for (ScheduledSequence& part : planned_->sequences) {
    Sequence& s = *part.sequence;
    if (!part.samples || s.drafts.empty()) continue;
    VL_ASSERT(num_in_flight_ == 0 && s.group == nullptr);
    const int32_t end = part.first_token + part.num_tokens;
    const auto num_blocks =
        static_cast<int64_t>(s.block_table.blocks.size()) + cache_.num_available_blocks();
    const int64_t num_slots = std::min<int64_t>(num_blocks * block_size_ - end, kMaxDrafts);
    // With all of them right the sequence has one token more than drafts.
    const int32_t num_drafts =
        std::min({static_cast<int32_t>(s.drafts.size()), config_.num_speculative_tokens, left,
                  s.max_total_tokens - end - 1, max_chunk() - part.num_tokens,
                  static_cast<int32_t>(num_slots)});
    if (num_drafts <= 0) continue;
    const bool grown = cache_.grow(s.block_table, end + num_drafts);
    VL_ASSERT(grown);
    part.num_drafts = num_drafts;
    step.num_drafts += num_drafts;
    left -= num_drafts;
    budget -= num_drafts;
    std::vector<int32_t>& rounds = planned_->draft_rounds;
    rounds.resize(std::max(rounds.size(), static_cast<size_t>(num_drafts)));
    for (int32_t i = 0; i < num_drafts; ++i) ++rounds[static_cast<size_t>(i)];
  }
}

// Serves the running sequences in order. True if somebody was preempted. Those preempted come from
// the back of the order that is being walked, so none of them has been scheduled in this plan.
bool Scheduler::schedule_running(int32_t& budget) {
  const bool has_groups = num_groups_ > 0;
  int32_t num_decodes = 0;  // not yet served: each has a token of the budget kept for it
  for (Sequence* s = running_.front(); s != nullptr; s = running_.next(s)) {
    VL_ASSERT(s->num_tokens() < s->max_total_tokens || s->samples_nothing() || s->group != nullptr);
    num_decodes += has_groups ? num_decoding(*s) : num_remaining(*s) == 1;
  }
  bool preempted = false;
  for (Sequence* s = running_.front(); s != nullptr; s = running_.next(s)) {
    if (has_groups && s->group != nullptr) {
      // A copy, so that this loop has its own in a register.
      int32_t decodes = num_decodes;
      bool any = preempted;
      if (!schedule_beams(*s->group, budget, decodes, any)) return true;
      num_decodes = decodes;
      preempted = any;
      continue;
    }
    const int32_t remaining = num_remaining(*s);
    num_decodes -= remaining == 1;
    const int32_t num_tokens = std::min({remaining, max_chunk(), budget - num_decodes});
    // A chunk for which this step has nothing left, or a sequence whose last token is to come.
    if (num_tokens <= 0) continue;
    const int32_t needed = s->num_planned + num_tokens;
    const auto capacity = static_cast<int64_t>(s->block_table.blocks.size()) * block_size_;
    if (needed > capacity) {
      while (!cache_.grow(s->block_table, needed)) {
        VL_ASSERT(running_.size() >
                  1);  // alone, a sequence has the whole pool, and add() saw that it fits
        Sequence* victim = running_.back();
        preempted = true;
        if (victim == s) {
          preempt(s);
          return true;
        }
        num_decodes -= num_decoding(*victim);
        preempt(victim);
      }
    }
    schedule(s, num_tokens, remaining, false);
    budget -= num_tokens;
  }
  return preempted;
}

// Serves all beams of a running group. Room for all is made first, so that each fork and each
// growth succeeds and no copy of this step is undone. False if the group was preempted, being the
// last.
bool Scheduler::schedule_beams(BeamGroup& group, int32_t& budget, int32_t& num_decodes,
                               bool& preempted) {
  num_decodes -= num_decoding(*group.first);
  const Sequence& front = *group.beams.front();
  const int32_t remaining = num_remaining(front);
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
    num_decodes -= num_decoding(*victim);
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

void Scheduler::admit_waiting(int32_t& budget) {
  blocked_.clear();
  size_t num_passed = 0;  // leading ones of blocked_ that somebody was admitted past
  int32_t num_tried_past = 0;
  Sequence* next = nullptr;
  for (Sequence* s = waiting_.front(); s != nullptr; s = next) {
    if (budget == 0 || num_rows_in_use() >= max_running_) break;
    next = waiting_.next(s);
    if (in_flight(s)) break;  // preempted just now: first its token comes
    if (awaits_parent(*s)) {
      waiting_.erase(s);
      ++num_parked_;
      continue;
    }
    if (cache_.awaits(s->block_table)) continue;
    const bool looks_past = !blocked_.empty();
    if (looks_past && num_tried_past == config_.look_past) break;
    const AdmitResult result = try_admit(s, headroom());
    if (result == AdmitResult::kHeldBack) continue;
    num_tried_past += looks_past;
    if (result == AdmitResult::kNoRoom) {
      blocked_.push_back(s);
      if (s->num_passed_over >= config_.max_passed_over) break;
      continue;
    }
    num_passed = blocked_.size();
    const int32_t remaining = num_remaining(*s);
    const int32_t num_tokens = std::min({remaining, max_chunk(), budget});
    schedule(s, num_tokens, remaining, true);
    budget -= num_tokens;
  }
  for (size_t i = 0; i < num_passed; ++i) ++blocked_[i]->num_passed_over;
}

Scheduler::AdmitResult Scheduler::try_admit(Sequence* sequence, int32_t headroom) {
  Sequence& s = *sequence;
  if (num_rows_in_use() + num_rows(s) > max_running_) return AdmitResult::kNoRoom;
  // All the memory that decoding needs, taken before anything changes.
  const auto reserve = [&](Sequence& each) {
    each.block_table.reserve(cache_.blocks_for(s.max_total_tokens));
    each.tokens.reserve(static_cast<size_t>(s.max_total_tokens));
  };
  reserve(s);
  if (s.group != nullptr) {
    for (Sequence* beam : s.group->beams) reserve(*beam);
  }
  int32_t num_cached = 0;
  const ForkResult forked = can_fork(s) ? try_fork(sequence, headroom) : ForkResult::kImpossible;
  if (forked == ForkResult::kNoRoom) return AdmitResult::kNoRoom;
  if (forked == ForkResult::kDone) {
    s.num_computed = s.num_prompt_tokens - 1;
  } else {
    const bool is_last = running_.empty() || running_.before(*running_.back(), s);
    num_cached = cache_.admit(s.block_table, s.tokens, s.salt, s.num_tokens(), headroom,
                              is_last ? config_.min_awaited_tokens : 0, max_hit_tokens(s));
    if (num_cached == KvCacheManager::kAwaits) return AdmitResult::kHeldBack;
    if (num_cached == KvCacheManager::kNoRoom) return AdmitResult::kNoRoom;
    s.num_computed = num_cached;
  }
  s.num_planned = s.num_computed;
  detach_fork(sequence);
  if (s.num_cached_tokens < 0) s.num_cached_tokens = num_cached;
  s.num_passed_over = 0;
  if (s.group != nullptr) {
    for (Sequence* beam : s.group->beams) take_row(beam);
  } else {
    take_row(sequence);
  }
  s.num_blocks_sent = 0;  // it is in this step
  waiting_.erase(sequence);
  s.state = SequenceState::kRunning;
  running_.insert(sequence);
  return AdmitResult::kDone;
}

// All or nothing: the room is counted first, so that neither the copy nor the growth can fail for
// it, and a refused fork means that a sliding window has taken blocks which the sample needs.
Scheduler::ForkResult Scheduler::try_fork(Sequence* sequence, int32_t headroom) {
  Sequence& s = *sequence;
  const int32_t num_shared = s.num_prompt_tokens - 1;
  const int32_t num_new = cache_.blocks_for(s.num_tokens()) - num_shared / block_size_;
  if (cache_.num_available_blocks() < num_new + headroom) return ForkResult::kNoRoom;
  if (!cache_.fork(s.fork_parent->block_table, s.block_table, num_shared, planned_->copies)) {
    return ForkResult::kImpossible;
  }
  const bool grown = cache_.grow(s.block_table, s.num_tokens());
  VL_ASSERT(grown);
  return ForkResult::kDone;
}

void Scheduler::commit(std::span<const TokenId> sampled) {
  VL_ASSERT(num_in_flight_ > 0);
  PlannedStep& planned = steps_[index_of_step(0)];
  VL_ASSERT(sampled.size() == static_cast<size_t>(planned.step.num_logits()));
  oldest_step_ = (oldest_step_ + 1) % kMaxStepsInFlight;
  --num_in_flight_;
  last_ended_ = planned.number;
  ++totals_.num_steps;
  auto next_sampled = sampled.begin();
  DraftRounds rounds(planned.step);
  const bool has_extras = num_groups_ > 0 || config_.num_speculative_tokens > 0;
  for (ScheduledSequence& part : planned.sequences) {
    Sequence& s = *part.sequence;
    const TokenId token = part.samples ? *next_sampled++ : kNoToken;
    if (has_extras && commit_extra(part, token, sampled, rounds)) continue;
    if (s.state == SequenceState::kFinished) continue;
    s.num_pending -= part.samples;
    // A failed row may have left rubbish in its KV: it is not counted as computed, nor published.
    if (part.samples && token < 0) {
      s.num_planned = s.num_computed;
      continue;
    }
    // Else it was preempted since, and its blocks are no longer its own.
    if (s.state == SequenceState::kRunning) {
      s.num_computed = part.first_token + part.num_tokens;
      cache_.mark_computed(s.block_table, s.tokens, s.salt, s.num_computed);
    }
    if (part.samples) s.tokens.push_back(token);
    if (s.forks != nullptr && s.num_computed >= s.num_prompt_tokens) unpark_forks(s);
  }
}

// True if the part was a beam's or had drafts: then all is done for it.
bool Scheduler::commit_extra(ScheduledSequence& part, TokenId token,
                             std::span<const TokenId> sampled, DraftRounds& rounds) {
  Sequence& s = *part.sequence;
  if (part.num_drafts > 0) {
    commit_drafts(part, token, sampled, rounds);
    return true;
  }
  if (part.samples) s.drafts.clear();
  if (s.group == nullptr || s.state == SequenceState::kFinished) return false;
  commit_beam(part, token);
  return true;
}

void Scheduler::commit_drafts(ScheduledSequence& part, TokenId token,
                              std::span<const TokenId> sampled, DraftRounds& rounds) {
  Sequence& s = *part.sequence;
  const bool is_running = s.state == SequenceState::kRunning;
  bool all_right = true;
  for (int32_t i = 0; i < part.num_drafts; ++i) {
    const TokenId next = sampled[static_cast<size_t>(rounds.next(i))];
    all_right = all_right && token == s.drafts[static_cast<size_t>(i)];
    if (!all_right) continue;
    ++part.num_accepted;
    if (is_running) s.tokens.push_back(token);
    token = next;
  }
  ++totals_.num_drafted_parts;
  totals_.num_draft_tokens += part.num_drafts;
  totals_.num_accepted_tokens += part.num_accepted;
  s.drafts.clear();
  if (!is_running) return;
  --s.num_pending;
  if (token >= 0) s.tokens.push_back(token);
  // Else the row failed at once.
  if (s.num_tokens() > part.first_token + part.num_tokens) {
    s.num_computed = s.num_tokens() - 1;
    cache_.mark_computed(s.block_table, s.tokens, s.salt, s.num_computed);
  }
  s.num_planned = s.num_computed;
  if (s.forks != nullptr && s.num_computed >= s.num_prompt_tokens) unpark_forks(s);
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

void Scheduler::cancel_steps() {
  VL_ASSERT(num_in_flight_ > 0);
  for (int32_t i = 0; i < num_in_flight_; ++i) {
    for (const ScheduledSequence& part : steps_[index_of_step(i)].sequences) {
      Sequence& s = *part.sequence;
      if (s.group != nullptr) {
        if (s.group->first->state == SequenceState::kRunning) back_to_waiting(s.group->first);
        continue;
      }
      s.num_pending = 0;
      if (s.state != SequenceState::kRunning) continue;
      s.num_planned = s.num_computed;
      if (part.new_row) {
        back_to_waiting(&s);
        if (s.num_preemptions == 0) s.num_cached_tokens = -1;
      } else {
        // All that this step can have sent of its table is where its new tokens go.
        s.num_blocks_sent = std::min(s.num_blocks_sent, part.first_token / block_size_);
      }
    }
  }
  for (int32_t i = 0; i < num_in_flight_; ++i) {
    for (RowId row : steps_[index_of_step(i)].freed_rows) {
      // It was given in the step as well, or freed once more.
      if (row_unreported_[static_cast<size_t>(row)]) continue;
      row_unreported_[static_cast<size_t>(row)] = true;
      unreported_rows_.push_back(row);
    }
  }
  num_in_flight_ = 0;
  last_ended_ = step_number_;
}

void Scheduler::recompute_all() {
  VL_ASSERT(num_in_flight_ == 0);
  while (!running_.empty()) preempt(running_.back());
  cache_.reset_prefix_cache();
  unreported_rows_.clear();
  row_unreported_.assign(row_unreported_.size(), false);
}

void Scheduler::preempt(Sequence* sequence) {
  back_to_waiting(sequence);
  ++sequence->num_preemptions;
  ++totals_.num_preemptions;
}

// From running to waiting, with nothing computed.
void Scheduler::back_to_waiting(Sequence* sequence) {
  running_.erase(sequence);
  give_back(sequence);
  if (sequence->group != nullptr) restart(*sequence->group);
  sequence->num_computed = sequence->num_planned = 0;
  sequence->state = SequenceState::kWaiting;
  waiting_.insert(sequence);
  unpark_forks(*sequence);
}

void Scheduler::take_row(Sequence* sequence) {
  sequence->row = free_rows_.back();
  sequence->num_blocks_sent = -1;
  free_rows_.pop_back();
}

// Blocks and rows of a sequence, or of the group that it stands for.
void Scheduler::give_back(Sequence* sequence) {
  const std::span<Sequence* const> all =
      sequence->group == nullptr ? std::span(&sequence, 1) : std::span(sequence->group->beams);
  for (Sequence* s : all) {
    cache_.release(s->block_table);
    free_row(s->row);
    s->row = -1;
  }
}

void Scheduler::free_row(RowId row) {
  free_rows_.push_back(row);
  unreported_rows_.push_back(row);
  row_unreported_[static_cast<size_t>(row)] = true;
}

// Takes a waiting sample out of its parent's chain, if it is in one.
void Scheduler::detach_fork(Sequence* sequence) {
  Sequence& s = *sequence;
  if (s.fork_parent == nullptr) return;
  if (s.prev_fork != nullptr) {
    s.prev_fork->next_fork = s.next_fork;
  } else {
    s.fork_parent->forks = s.next_fork;
  }
  if (s.next_fork != nullptr) s.next_fork->prev_fork = s.prev_fork;
  s.fork_parent = s.prev_fork = s.next_fork = nullptr;
}

// Puts the samples that stood aside back into the queue's order. The chain is latest first, so each
// goes directly before the one inserted last.
void Scheduler::unpark_forks(const Sequence& parent) {
  for (Sequence* s = parent.forks; s != nullptr; s = s->next_fork) {
    if (s->hook.linked()) continue;
    waiting_.insert(s);
    --num_parked_;
  }
}

int32_t Scheduler::headroom() const { return std::min(num_rows_in_use(), max_headroom_); }

int32_t Scheduler::max_chunk() const {
  return config_.max_chunk_tokens > 0 ? config_.max_chunk_tokens : config_.max_num_batched_tokens;
}

bool Scheduler::has_work() const {
  return !running_.empty() || !waiting_.empty() || num_in_flight_ > 0;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = totals_;
  stats.num_running = running_.size();
  stats.num_waiting = waiting_.size() + num_parked_;
  return stats;
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
      VL_ASSERT(awaits_parent(*s) && s->row == -1 && s->block_table.blocks.empty());
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
