// Decides before every forward step which tokens of which sequences to compute.
//
// One token budget per step; no prefill phase and no decode phase: every sequence's num_computed
// chases its num_tokens. Running sequences are served first (so a decode is never starved by new
// prompts), in order of (priority, arrival); then waiting ones are admitted while budget, rows and
// blocks last. A sequence is admitted only with blocks for its whole prompt (all its tokens, after a
// preemption); chunks only cut the computing. When a running sequence cannot grow, the running one
// with the lowest priority and latest arrival is preempted: its blocks are released and it waits again
// with all its tokens, to be recomputed.
//
// If the head of the waiting queue does not fit, up to `look_past` later ones may be admitted past it,
// each such step adding one to its num_passed_over; at `max_passed_over` the look-past stops until it
// has been admitted, so it cannot starve.
//
// Progress: whenever sequences exist, plan() returns a non-empty step (Scheduler::add refuses what could
// never fit, and preemption always leaves the oldest sequence running).
//
// Two calls a step: plan(), then commit() with the sampled tokens. plan() changes only the scheduler's
// own state and cannot fail half-way. Between plan and commit sequences may be added or aborted; an
// aborted one is skipped by commit, and its blocks and row are kept until then (the device is using them).
// Steady-state decode allocates no heap memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "core/intrusive_list.h"
#include "scheduler/sequence.h"

namespace vllm_lite {

enum class SchedulingPolicy : uint8_t { kFirstCome, kPriority };

struct SchedulerConfig {
  int32_t max_num_seqs = 256;             // rows
  int32_t max_num_batched_tokens = 2048;  // token budget of a step
  int32_t max_model_len = 0;
  int32_t max_num_waiting = 4096;  // bound of the waiting queue
  // Tokens of one sequence in one step at most; 0: only the budget limits it.
  int32_t max_chunk_tokens = 0;
  SchedulingPolicy policy = SchedulingPolicy::kFirstCome;
  int32_t look_past = 4;
  int32_t max_passed_over = 16;
};

// A part of a step: tokens [num_computed_before, num_computed_before + num_tokens) of a sequence.
struct ScheduledSequence {
  Sequence* sequence;
  int32_t first_token;   // position of the first token computed
  int32_t num_tokens;
  bool samples;          // the last token is the sequence's last: a new token is sampled
  bool new_row;          // the row was given in this step
};

// What plan() decided. The spans point into the scheduler and hold until the next plan().
struct Step {
  std::span<const ScheduledSequence> sequences;  // decodes and chunks, running order
  std::span<const RowId> freed_rows;             // since the last step, before any new_row
  std::span<const BlockCopy> copies;             // to be made before the forward pass
  int32_t num_tokens = 0;
  int32_t num_samples = 0;
  bool empty() const { return sequences.empty(); }
};

enum class AddResult : uint8_t { kAdded, kQueueFull };

struct SchedulerStats {
  int32_t num_running = 0;
  int32_t num_waiting = 0;
  int64_t num_preemptions = 0;
  int64_t num_steps = 0;
};

class Scheduler {
 public:
  // Throws Error if the configuration cannot work: a limit below 1, a budget of fewer tokens than
  // one, or a pool in which one sequence of max_model_len tokens does not fit (the message says the largest
  // max_model_len that does).
  Scheduler(const SchedulerConfig& config, KvCacheManager& cache);

  // Throws Error, naming the numbers, for a sequence that can never run: no tokens, prompt not below
  // max_model_len, or (prompt + output) needing more blocks than the pool has. kQueueFull leaves it alone.
  // The caller keeps ownership and must keep the sequence alive until it is finished and reaped.
  AddResult add(Sequence* sequence);

  // Takes a sequence out. O(1). Its blocks and row come back at once if no step is in flight with it,
  // else at commit; `sequence->state` is kFinished at once either way.
  // REQUIRES: it was added and is not finished.
  void finish(Sequence* sequence);

  // True if the sequence is part of the step in flight (then it must stay alive until commit).
  bool in_flight(const Sequence* sequence) const;

  // REQUIRES: no step is in flight. An empty step needs no commit and is not in flight.
  const Step& plan();

  // The step in flight. REQUIRES: one is.
  const Step& current_step() const;

  // `sampled[i]` belongs to the i-th scheduled sequence with samples == true; kNoToken drops it (the row
  // failed; the caller finishes the sequence). Appends tokens to sequences that are not finished,
  // publishes computed blocks. Does not judge stops: the caller then calls finish().
  void commit(std::span<const TokenId> sampled);

  // The step in flight failed: nothing was computed. num_computed goes back to what it was before plan().
  void cancel_step();

  bool has_work() const;
  SchedulerStats stats() const;
  const SchedulerConfig& config() const { return config_; }

  // Throws InternalError unless every invariant of this header and of KvCacheManager holds.
  void check_invariants() const;

 private:
  SchedulerConfig config_;
  KvCacheManager& cache_;
  // (the implementer's members)
};

constexpr TokenId kNoToken = -1;

}  // namespace vllm_lite
