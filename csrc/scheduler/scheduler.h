// Decides before every forward step which tokens of which sequences to compute.
//
// One token budget per step; no prefill phase and no decode phase: every sequence's num_computed
// chases its num_tokens. Running sequences are served first (so a decode is never starved by new
// prompts), in order of (priority, arrival); then waiting ones are admitted while budget, rows and
// blocks last. A sequence is admitted only with blocks for its whole prompt (all its tokens, after
// a preemption); chunks only cut the computing. When a running sequence cannot grow, the running
// one with the lowest priority and latest arrival is preempted: its blocks are released and it
// waits again with all its tokens, to be recomputed. A step that preempts admits nobody.
//
// Decodes never wait (K = 1): a chunk leaves a token of the budget for every running sequence
// behind it that has one token to compute, and at most min(max_num_seqs, max_num_batched_tokens)
// sequences run. So each step gives a token to every running sequence whose earlier tokens are
// computed.
//
// Headroom: an admission leaves min(running sequences, max(1, blocks / 16)) blocks available, so
// that those running can each grow for a while before the newcomer is preempted again. Nobody
// running: no headroom.
//
// If the head of the waiting queue does not fit, up to `look_past` later ones are tried, and each
// step that admits one adds one to num_passed_over of those passed; behind a sequence that has
// `max_passed_over` and does not fit nobody is tried until it has been admitted, so it cannot
// starve.
//
// A prefix is computed once: a waiting sequence is held back while running ones are about to
// compute at least `min_awaited_tokens` of its tokens next after its cached prefix, in this step,
// one in flight or a later one; then it is admitted with all of them as a hit. In chunks, too, it
// hardly loses by that: where there is budget left to admit anybody, each of those running has got
// its chunk, so that by itself it would not reach the end of the common part in an earlier step.
// What it can lose is the rest of one step, which a short common part is not worth. It waits only
// for sequences that are served before it: where one that comes after it in the queue's order runs,
// it does not wait at all, since those that arrive between the two would be served before both. Who
// is held back keeps its place in the queue, counts neither for look_past nor as passed over, and
// is tried again once the last of those tokens is computed or whoever was to compute it was
// preempted, finished or failed. Cost: while it waits O(1) a step without a hash; before and after,
// the look-up of admission.
//
// Forks (Sequence::fork_parent): while the parent runs and computes its prompt, the sample stands
// aside, outside the queue's order, holding up nobody. Then all prompt tokens but the last are
// forked, and the sample computes the last one to sample its own first token. If the parent is not
// running or has lost blocks to a sliding window, the sample is admitted as any other.
//
// Beams (Sequence::group): a group is admitted with as many rows as it has beams, and begins with
// one in use, which computes the prompt. After each step of it set_beams() says which beams go on:
// the first to go on from a beam keeps its blocks and row, each further one shares the whole
// blocks, has a copy of a partly filled one, and takes the row of one that does not go on. Either
// there is room for all its beams, or the group is preempted whole; then it gives up what it has
// found and begins again with its prompt, since nothing of it is out yet. So no beam ever holds
// blocks while it waits for another's.
//
// Progress: whenever sequences exist and no step is in flight, plan() returns a non-empty step
// (Scheduler::add refuses what could never fit, and preemption always leaves the first in order
// running).
//
// Two calls a step: plan(), then commit() with the sampled tokens. plan() changes only the
// scheduler's own state and cannot fail half-way. num_computed advances and blocks are published at
// commit alone, so nothing ever hits or forks a block that is only about to be computed (those are
// announced to the prefix index at admission, for others to wait for). Between plan and commit
// sequences may be added or finished; commit skips a finished one. Steady-state decode allocates no
// heap memory.
//
// Asynchronous scheduling: a step may be planned while the one before is in flight. Its tokens are
// then known by number only: num_planned and num_pending stand for the steps in flight, a sequence
// whose last tokens are to come may reach its limit but is never planned beyond it, and the builder
// writes placeholders for values. What a stop found at a commit makes of the next step is thrown
// away there. A sequence that is preempted in between still gets the token that is to come, and
// waits for it before it is admitted again.
//
// Blocks and rows that finish() or a preemption takes back may be given again by the very next plan
// although steps in flight use them: the worker carries steps out in the order of their plans, so
// whatever they are used for next happens after that. Nor can a block that a step in flight writes
// be found through the prefix index: published blocks are full of committed tokens, and a step
// writes behind those.
//
// Prompt log-probabilities (Sequence::num_prompt_logprobs) and mean pooling need hidden states of
// tokens that a prefix hit would skip: such a sequence takes hits only up to score_begin, or none.
// Its own blocks are published as any.
//
// Drafts (Sequence::drafts): a step that computes the last known token of a sequence may compute
// guesses of the next ones with it, and sample after each of them. A guess that is what was sampled
// before it is right, and so is what was sampled after it; from the first wrong one on all is
// dropped, so that a sequence has the tokens that it would have without. Drafts take what a step
// has left of tokens, logits and blocks when everybody has been served, and blocks that wrong ones
// took are given back at commit: they delay nobody and preempt nobody. They are in none of
// num_planned, num_pending and ScheduledSequence::num_tokens. Not together with asynchronous
// scheduling: where the next step begins is known at commit alone.
//
// Sliding window: blocks that fall out are given back at commit and their table entries become
// kNoBlock. The worker is not told: it keeps a stale entry that no query looks at any more.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "scheduler/sequence.h"
#include "scheduler/sequence_queue.h"

namespace vllm_lite {

enum class SchedulingPolicy : uint8_t { kFirstCome, kPriority };

// Two: while the worker carries out one step, the next is there for it already.
constexpr int32_t kMaxStepsInFlight = 2;

struct SchedulerConfig {
  int32_t max_num_seqs = 256;             // rows, and so running sequences
  int32_t max_num_batched_tokens = 2048;  // token budget of a step
  int32_t max_model_len = 0;
  int32_t max_num_waiting = 4096;  // bound of the waiting queue
  // Tokens of one sequence in one step at most; 0: only the budget limits it.
  int32_t max_chunk_tokens = 0;
  SchedulingPolicy policy = SchedulingPolicy::kFirstCome;
  int32_t look_past = 4;
  int32_t max_passed_over = 16;
  // Tokens that a sequence waits for rather than computes them itself; 0: it never waits. A bound
  // for what waiting costs, one reading of the weights: the arithmetic of some ten tokens on a CPU,
  // of some hundred on a GPU (estimates from their ratios of FLOPs to bytes).
  int32_t min_awaited_tokens = 64;
  // Drafts of one sequence in one step, at most kMaxDrafts; 0: drafts are not looked at.
  int32_t num_speculative_tokens = 0;
  // Samples and drafts of one step, for which the worker has room; 0: no limit. At least
  // max_num_seqs.
  int32_t max_num_logits = 0;
};

// A part of a step: tokens [num_computed_before, num_computed_before + num_tokens) of a sequence.
struct ScheduledSequence {
  Sequence* sequence;
  int32_t first_token;  // position of the first token computed
  int32_t num_tokens;
  bool samples;  // the last token is the sequence's last: a new token is sampled
  bool new_row;  // the row was given in this step
  // Positions [first_scored, first_scored + num_scored) of it give a prompt token's
  // log-probability.
  int32_t first_scored = 0;
  int32_t num_scored = 0;
  // Of the sequence's drafts: those computed behind num_tokens, and of them, after commit(), those
  // that were right.
  int32_t num_drafts = 0;
  int32_t num_accepted = 0;

  // The part with which a sequence that samples nothing is over.
  bool ends_prompt() const {
    return sequence->samples_nothing() && first_token + num_tokens == sequence->num_prompt_tokens;
  }
};

// What plan() decided. The spans point into the scheduler and hold until the first plan() after the
// step was committed or cancelled; those of an empty step until the next.
struct Step {
  std::span<const ScheduledSequence> sequences;  // decodes and chunks, running order
  std::span<const RowId> freed_rows;      // since the last non-empty step, before any new_row
  std::span<const BlockCopy> copies;      // to be made before the forward pass
  std::span<const int32_t> draft_rounds;  // [i]: sequences with more than i drafts
  int32_t num_tokens = 0;                 // with drafts
  int32_t num_samples = 0;                // parts that sample
  int32_t num_drafts = 0;
  int32_t num_scored = 0;
  int32_t num_pooled = 0;   // parts of sequences with a Pooling that the worker must see
  int32_t num_vectors = 0;  // those of them that end
  bool empty() const { return sequences.empty(); }
  int32_t num_logits() const { return num_samples + num_drafts; }
};

// The order of a step's logits: one for each part that samples, then, round after round, those at
// the parts' first drafts, second drafts and so on, each in the order of the parts.
class DraftRounds {
 public:
  explicit DraftRounds(const Step& step) {
    int32_t begin = step.num_samples;
    size_t round = 0;
    for (const int32_t size : step.draft_rounds) {
      next_[round++] = begin;
      begin += size;
    }
  }
  // The logit at draft `i` of a part. Part after part asks for all of its drafts.
  int32_t next(int32_t i) { return next_[static_cast<size_t>(i)]++; }

 private:
  std::array<int32_t, kMaxDrafts> next_{};
};

enum class AddResult : uint8_t { kAdded, kQueueFull };

struct SchedulerStats {
  int32_t num_running = 0;
  int32_t num_waiting = 0;
  int64_t num_preemptions = 0;
  int64_t num_steps = 0;
  // Of the parts with drafts whose results have come.
  int64_t num_drafted_parts = 0;
  int64_t num_draft_tokens = 0;
  int64_t num_accepted_tokens = 0;
};

class Scheduler {
 public:
  // Throws Error if the configuration cannot work: a limit below 1, a budget of fewer tokens than
  // one, or a pool in which one sequence of max_model_len tokens does not fit (the message says the
  // largest max_model_len that does).
  Scheduler(const SchedulerConfig& config, KvCacheManager& cache);

  // Throws Error, naming the numbers, for a sequence that can never run: no tokens, prompt not
  // below max_model_len, or max_total_tokens not in (tokens, max_model_len], or the prompt's;
  // whatever passes fits into the pool, as the constructor saw to it. kQueueFull leaves the
  // sequence alone. The caller keeps ownership, must keep the sequence alive until it is finished
  // and not in flight, and must finish it once it has max_total_tokens tokens. REQUIRES: state is
  // kNew; fork_parent, if any, was added before and starts with the same prompt. Of a
  // group its first is added, whose prompt and limits are those of all; refused, too, if it has
  // more beams than may run or than the pool can hold at their greatest length.
  AddResult add(Sequence* sequence);

  // Takes a sequence out and its blocks and row back. O(blocks), and O(1) for each sample that
  // waits for it. REQUIRES: it was added and is not finished.
  void finish(Sequence* sequence);

  // True if the sequence is part of a step in flight (then it must stay alive until that has been
  // committed or cancelled).
  bool in_flight(const Sequence* sequence) const { return sequence->last_step > last_ended_; }

  // REQUIRES: fewer than kMaxStepsInFlight steps are in flight. An empty step needs no commit and
  // is not in flight.
  const Step& plan();

  int32_t num_in_flight() const { return num_in_flight_; }
  // Step `i` in flight, the oldest is 0. REQUIRES: i < num_in_flight().
  const Step& step_in_flight(int32_t i) const;

  // The oldest step in flight was carried out. `sampled[i]` belongs to the i-th scheduled sequence
  // with samples == true, and those behind to drafts (DraftRounds); kNoToken drops it (the row
  // failed: nothing from there on is kept or published for it; the caller finishes the sequence).
  // Appends tokens to sequences that are not finished, publishes computed blocks. Does not judge
  // stops: the caller then calls finish().
  void commit(std::span<const TokenId> sampled);

  // How a group goes on after a step that sampled from it: beam i of the next step is the beam
  // next[i].parent of that step with next[i].token behind it. O(tokens) for each beam that shares
  // its parent. REQUIRES: the group runs and is not in flight, no row of it failed, and next has
  // from 1 to width entries.
  struct NextBeam {
    int32_t parent;
    TokenId token;
  };
  void set_beams(BeamGroup& group, std::span<const NextBeam> next);

  // The oldest step in flight failed, and with it those planned on top of it: nothing was computed.
  // num_planned is num_computed again, and sequences that the steps admitted wait again (a fork
  // then without its parent), groups with their prompt; preemptions stay. The next plan says again
  // what the worker may have missed: freed rows, the steps' table entries, and the rows given in
  // the steps (as freed). So it is right whether or not the worker had taken the plans in.
  // REQUIRES: a step is in flight.
  void cancel_steps();

  // The worker was restarted, its memory is gone: every running sequence waits again with all its
  // tokens, cached prefixes are forgotten, no row is known to the worker. Counts as preemptions.
  // REQUIRES: no step is in flight (cancel_steps first).
  void recompute_all();

  bool has_work() const;
  SchedulerStats stats() const;
  const SchedulerConfig& config() const { return config_; }

  // Throws InternalError unless every invariant of this header and of KvCacheManager holds.
  void check_invariants() const;

 private:
  struct PlannedStep {
    Step step;
    uint64_t number = 0;
    std::vector<ScheduledSequence> sequences;
    std::vector<BlockCopy> copies;
    std::vector<RowId> freed_rows;
    std::vector<int32_t> draft_rounds;
  };

  // Inlined: a call for each sequence is a tenth of a step.
  [[gnu::always_inline]] void schedule(Sequence* sequence, int32_t num_tokens, int32_t remaining,
                                       bool new_row) {
    const bool samples = num_tokens == remaining && !sequence->samples_nothing();
    planned_->sequences.emplace_back(sequence, sequence->num_planned, num_tokens, samples, new_row);
  }
  void plan_scores(ScheduledSequence& part);
  void plan_drafts(int32_t& budget);
  bool schedule_running(int32_t& budget);
  // Not inlined: the loops that call them are short without them.
  [[gnu::noinline]] bool schedule_beams(BeamGroup& group, int32_t& budget, int32_t& num_decodes,
                                        bool& preempted);
  [[gnu::noinline]] bool commit_extra(ScheduledSequence& part, TokenId token,
                                      std::span<const TokenId> sampled, DraftRounds& rounds);
  void commit_drafts(ScheduledSequence& part, TokenId token, std::span<const TokenId> sampled,
                     DraftRounds& rounds);
  void commit_beam(const ScheduledSequence& part, TokenId token);
  void replace_beam(Sequence* beam, Sequence* parent);
  void restart(BeamGroup& group);
  void check_fits(const BeamGroup& group) const;
  void check_group(const BeamGroup& group) const;
  int32_t num_rows_in_use() const {
    return config_.max_num_seqs - static_cast<int32_t>(free_rows_.size());
  }
  void admit_waiting(int32_t& budget);
  enum class AdmitResult : uint8_t { kDone, kNoRoom, kHeldBack };
  AdmitResult try_admit(Sequence* sequence, int32_t headroom);
  enum class ForkResult : uint8_t { kDone, kNoRoom, kImpossible };
  ForkResult try_fork(Sequence* sequence, int32_t headroom);
  // Steps in flight, the oldest is 0.
  size_t index_of_step(int32_t i) const {
    return static_cast<size_t>((oldest_step_ + i) % kMaxStepsInFlight);
  }
  void preempt(Sequence* sequence);
  void back_to_waiting(Sequence* sequence);
  void take_row(Sequence* sequence);
  void give_back(Sequence* sequence);
  void free_row(RowId row);
  void detach_fork(Sequence* sequence);
  void unpark_forks(const Sequence& parent);
  int32_t headroom() const;
  int32_t max_chunk() const;

  const SchedulerConfig config_;
  KvCacheManager& cache_;
  const int32_t block_size_;
  const int32_t max_running_;
  const int32_t max_headroom_;
  SequenceQueue running_;
  SequenceQueue waiting_;
  int32_t num_parked_ =
      0;  // waiting samples that stand aside until their parent's prompt is computed
  uint64_t next_arrival_ = 0;
  uint64_t step_number_ = 0;  // of the last plan()
  uint64_t last_ended_ = 0;   // number of the last step that was committed or cancelled
  int32_t num_in_flight_ = 0;
  int32_t oldest_step_ = 0;  // index of the oldest step in flight, or of the next
  std::array<PlannedStep, kMaxStepsInFlight> steps_;
  PlannedStep* planned_ = nullptr;      // the step that plan() is making, or made last
  std::vector<RowId> free_rows_;        // a stack: the row freed last is warm
  std::vector<RowId> unreported_rows_;  // freed, in no step yet
  std::vector<bool> row_unreported_;    // row -> is in unreported_rows_
  std::vector<Sequence*> blocked_;      // tried in this plan and found not to fit
  // Groups that were added and are not finished: without any the loops over sequences ask for none.
  int32_t num_groups_ = 0;
  SchedulerStats totals_;  // but for what runs and waits
};

constexpr TokenId kNoToken = -1;
// The row failed because its masks together left no token.
constexpr TokenId kAllMasked = -2;

}  // namespace vllm_lite
