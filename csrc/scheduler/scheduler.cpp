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
  if (waiting_.size() + num_parked_ >= config_.max_num_waiting) return AddResult::kQueueFull;

  s.state = SequenceState::kWaiting;
  s.arrival = next_arrival_++;
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
  planned.step = Step{};
  planned.number = ++step_number_;

  int32_t budget = config_.max_num_batched_tokens;
  const bool preempted = schedule_running(budget);
  if (!preempted) admit_waiting(budget);
  if (planned.sequences.empty()) return planned.step;

  // Nothing fails from here on.
  for (ScheduledSequence& part : planned.sequences) {
    part.sequence->last_step = step_number_;
    part.sequence->num_planned += part.num_tokens;
    part.sequence->num_pending += part.samples;
    planned.step.num_samples += part.samples;
    if (part.sequence->is_scored() || part.sequence->samples_nothing()) plan_scores(part);
  }

  // An empty step is not sent, so freed rows are reported by the first one that is not.
  planned.freed_rows.swap(unreported_rows_);
  for (RowId row : planned.freed_rows) row_unreported_[static_cast<size_t>(row)] = false;
  planned.step.num_tokens = config_.max_num_batched_tokens - budget;
  planned.step.sequences = planned.sequences;
  planned.step.freed_rows = planned.freed_rows;
  planned.step.copies = planned.copies;
  ++num_in_flight_;
  return planned.step;
}

void Scheduler::schedule(Sequence* sequence, int32_t num_tokens, int32_t remaining, bool new_row) {
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

// Serves the running sequences in order. True if somebody was preempted. Those preempted come from
// the back of the order that is being walked, so none of them has been scheduled in this plan.
bool Scheduler::schedule_running(int32_t& budget) {
  int32_t num_decodes = 0;  // not yet served: each has a token of the budget kept for it
  for (Sequence* s = running_.front(); s != nullptr; s = running_.next(s)) {
    VL_ASSERT(s->num_tokens() < s->max_total_tokens || s->samples_nothing());
    num_decodes += num_remaining(*s) == 1;
  }
  bool preempted = false;
  for (Sequence* s = running_.front(); s != nullptr; s = running_.next(s)) {
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
        num_decodes -= num_remaining(*victim) == 1;
        preempt(victim);
      }
    }
    schedule(s, num_tokens, remaining, false);
    budget -= num_tokens;
  }
  return preempted;
}

void Scheduler::admit_waiting(int32_t& budget) {
  blocked_.clear();
  size_t num_passed = 0;  // leading ones of blocked_ that somebody was admitted past
  int32_t num_tried_past = 0;
  Sequence* next = nullptr;
  for (Sequence* s = waiting_.front(); s != nullptr; s = next) {
    if (budget == 0 || running_.size() == max_running_) break;
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
  // All the memory that decoding needs, taken before anything changes.
  s.block_table.reserve(cache_.blocks_for(s.max_total_tokens));
  s.tokens.reserve(static_cast<size_t>(s.max_total_tokens));
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
  s.num_blocks_sent = 0;
  s.row = free_rows_.back();
  free_rows_.pop_back();
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
  const PlannedStep& planned = steps_[index_of_step(0)];
  VL_ASSERT(sampled.size() == static_cast<size_t>(planned.step.num_samples));
  oldest_step_ = (oldest_step_ + 1) % kMaxStepsInFlight;
  --num_in_flight_;
  last_ended_ = planned.number;
  ++num_steps_;
  auto next_sampled = sampled.begin();
  for (const ScheduledSequence& part : planned.sequences) {
    Sequence& s = *part.sequence;
    const TokenId token = part.samples ? *next_sampled++ : kNoToken;
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

void Scheduler::cancel_steps() {
  VL_ASSERT(num_in_flight_ > 0);
  for (int32_t i = 0; i < num_in_flight_; ++i) {
    for (const ScheduledSequence& part : steps_[index_of_step(i)].sequences) {
      Sequence& s = *part.sequence;
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
  ++num_preemptions_;
}

// From running to waiting, with nothing computed.
void Scheduler::back_to_waiting(Sequence* sequence) {
  running_.erase(sequence);
  give_back(sequence);
  sequence->num_computed = sequence->num_planned = 0;
  sequence->state = SequenceState::kWaiting;
  waiting_.insert(sequence);
  unpark_forks(*sequence);
}

void Scheduler::give_back(Sequence* sequence) {
  cache_.release(sequence->block_table);
  free_row(sequence->row);
  sequence->row = -1;
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

int32_t Scheduler::headroom() const { return std::min(running_.size(), max_headroom_); }

int32_t Scheduler::max_chunk() const {
  return config_.max_chunk_tokens > 0 ? config_.max_chunk_tokens : config_.max_num_batched_tokens;
}

bool Scheduler::has_work() const {
  return !running_.empty() || !waiting_.empty() || num_in_flight_ > 0;
}

SchedulerStats Scheduler::stats() const {
  return {.num_running = running_.size(),
          .num_waiting = waiting_.size() + num_parked_,
          .num_preemptions = num_preemptions_,
          .num_steps = num_steps_};
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

  const Sequence* previous = nullptr;
  for (const Sequence* s = running_.front(); s != nullptr; s = running_.next(s)) {
    VL_ASSERT(s->state == SequenceState::kRunning && s->fork_parent == nullptr);
    VL_ASSERT(previous == nullptr || running_.before(*previous, *s));
    VL_ASSERT(s->num_computed >= 0 && s->num_computed < s->num_tokens());
    VL_ASSERT(static_cast<int64_t>(s->block_table.blocks.size()) * block_size_ >=
              std::max(s->num_planned, s->num_prompt_tokens));
    check_planned(*s);
    take_row(s->row);
    tables.push_back(&s->block_table);
    check_forks(*s);
    previous = s;
  }
  previous = nullptr;
  for (const Sequence* s = waiting_.front(); s != nullptr; s = waiting_.next(s)) {
    VL_ASSERT(s->state == SequenceState::kWaiting);
    VL_ASSERT(previous == nullptr || waiting_.before(*previous, *s));
    VL_ASSERT(s->row == -1 && s->block_table.blocks.empty() && s->num_computed == 0);
    check_planned(*s);
    check_forks(*s);
    previous = s;
  }
  VL_ASSERT(num_parked == num_parked_);
  VL_ASSERT(running_.size() <= max_running_);
  VL_ASSERT(num_in_flight_ >= 0 && num_in_flight_ <= kMaxStepsInFlight);
  for (int32_t i = 0; i < num_in_flight_; ++i) {
    VL_ASSERT(steps_[index_of_step(i)].number >
              (i == 0 ? last_ended_ : steps_[index_of_step(i - 1)].number));
    for (const ScheduledSequence& part : steps_[index_of_step(i)].sequences) {
      VL_ASSERT(in_flight(part.sequence));
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
