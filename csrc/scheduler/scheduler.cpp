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

// Tokens that a prefix hit may spare: not those whose hidden states are wanted.
int32_t max_hit_tokens(const Sequence& sequence) {
  if (sequence.pooling == Pooling::kMean) return 0;
  const bool lacks_scores =
      sequence.is_scored() && sequence.score_begin < sequence.num_prompt_tokens - 1;
  return lacks_scores ? sequence.score_begin : sequence.num_tokens();
}

// REQUIRES: !sequence.awaits_parent().
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
    num_decodes += has_groups ? s->num_decoding() : s->num_remaining() == 1;
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
    const int32_t remaining = s->num_remaining();
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
        num_decodes -= victim->num_decoding();
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
    if (budget == 0 || num_rows_in_use() >= max_running_) break;
    next = waiting_.next(s);
    if (in_flight(s)) break;  // preempted just now: first its token comes
    if (s->awaits_parent()) {
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
    const int32_t remaining = s->num_remaining();
    const int32_t num_tokens = std::min({remaining, max_chunk(), budget});
    schedule(s, num_tokens, remaining, true);
    budget -= num_tokens;
  }
  for (size_t i = 0; i < num_passed; ++i) ++blocked_[i]->num_passed_over;
}

Scheduler::AdmitResult Scheduler::try_admit(Sequence* sequence, int32_t headroom) {
  Sequence& s = *sequence;
  if (num_rows_in_use() + s.num_rows() > max_running_) return AdmitResult::kNoRoom;
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
    // What wrong drafts took may be what others need for tokens of their own.
    cache_.shrink(s.block_table, s.num_computed);
    s.num_blocks_sent =
        std::min(s.num_blocks_sent, static_cast<int32_t>(s.block_table.blocks.size()));
  }
  s.num_planned = s.num_computed;
  if (s.forks != nullptr && s.num_computed >= s.num_prompt_tokens) unpark_forks(s);
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

}  // namespace vllm_lite
