// A sequence: one stream of tokens, the unit that is scheduled. A request with n = 4 has four.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "core/intrusive_list.h"
#include "core/types.h"
#include "scheduler/sampling_params.h"

namespace vllm_lite {

enum class SequenceState : uint8_t {
  kNew,       // not yet given to the scheduler
  kWaiting,   // in the waiting queue, holds no blocks and no row (also after a preemption)
  kRunning,   // holds blocks and a row
  kFinished,  // left the scheduler
  kBeam,      // a beam that is not its group's first, while that is none of kNew and kFinished
};

// The vector that a sequence which samples nothing is computed for, of the model's last hidden
// states: that of the prompt's last token, or the mean of all.
enum class Pooling : int32_t { kNone = 0, kLast = 1, kMean = 2 };
struct BeamGroup;

constexpr int32_t kMaxDrafts = 16;  // of one sequence in one step

// The invariant of progress: 0 <= num_computed < tokens.size() while not finished. num_computed
// chases tokens.size(); a whole prompt, a chunk, a decode and a resumed sequence differ in nothing
// else. num_planned and num_pending are the same two numbers once the steps in flight are done:
// num_computed <= num_planned < tokens.size() + num_pending <= max_total_tokens. A sequence that
// samples nothing may reach it: then it is over.
struct Sequence {
  // Set by the owner before Scheduler::add.
  RequestKey request = 0;
  int32_t sample_index = 0;  // which of the request's n
  int32_t priority = 0;      // lower runs first (priority policy)
  int32_t num_prompt_tokens = 0;
  // Prompt + output; the sequence ends when it has this many. As many as the prompt: nothing is
  // sampled, the sequence ends when its prompt is computed.
  int32_t max_total_tokens = 0;
  Pooling pooling = Pooling::kNone;
  // Log-probabilities of the prompt's tokens: with how many of the likeliest each; -1: none wanted.
  int32_t num_prompt_logprobs = -1;
  // The first position after which the log-probability of the next prompt token is still missing.
  // The owner advances it as results come.
  int32_t score_begin = 0;
  CacheSalt salt{};
  const SamplingParams* sampling = nullptr;
  // For samples 1..n-1: the sequence with the same prompt whose computed prompt this one forks; it
  // was added before. Cleared by the scheduler when the fork is made or no longer possible.
  Sequence* fork_parent = nullptr;
  BeamGroup* group = nullptr;   // of a beam search's sequences
  std::vector<TokenId> tokens;  // prompt, then output as far as it is known
  // Guesses of the tokens that come after those, for the next steps to verify; at most kMaxDrafts.
  // Cleared by the scheduler once a token has come.
  std::vector<TokenId> drafts;

  // Kept by the scheduler.
  SequenceState state = SequenceState::kNew;
  uint64_t arrival = 0;      // order of Scheduler::add, kept across preemptions
  int32_t num_computed = 0;  // tokens whose KV is stored; advances at commit, never at plan
  int32_t num_planned = 0;   // as num_computed, with the steps in flight; advances at plan
  int32_t num_pending = 0;   // tokens that steps in flight sample: known to come, values unknown
  // Prefix hit at the first admission (a fork: 0); -1: not yet admitted.
  int32_t num_cached_tokens = -1;
  int32_t num_preemptions = 0;
  int32_t num_passed_over = 0;  // steps that admitted a later sequence past this one as it waited
  uint64_t last_step = 0;       // number of the last step that it was scheduled in
  RowId row = -1;
  BlockTable block_table;
  // Entries of block_table that the worker knows (step builder); -1: nor does it know the row.
  int32_t num_blocks_sent = 0;
  ListHook hook;  // waiting or running list; none while it awaits its fork parent
  // The waiting samples whose fork_parent this is, latest first, and the place in such a chain.
  Sequence* forks = nullptr;
  Sequence* prev_fork = nullptr;
  Sequence* next_fork = nullptr;

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  bool samples_nothing() const { return max_total_tokens == num_prompt_tokens; }
  bool is_scored() const { return num_prompt_logprobs >= 0; }
  int32_t num_output_tokens() const { return num_tokens() - num_prompt_tokens; }
  // Tokens that are left to compute after the steps in flight. The last token that the limit allows
  // is never computed: it is sampled, and the sequence ends.
  int32_t num_remaining() const {
    const int32_t num_to_come = num_tokens() + num_pending;
    return num_to_come < max_total_tokens || samples_nothing() ? num_to_come - num_planned : 0;
  }
  // The parent is computing the prompt that this sample will fork.
  bool awaits_parent() const {
    return fork_parent != nullptr && fork_parent->state == SequenceState::kRunning &&
           fork_parent->num_computed < num_prompt_tokens;
  }
  // Rows that it, or the group that it stands for, has while it runs; and of these, those that have
  // one token to compute.
  int32_t num_rows() const;
  int32_t num_decoding() const;
};

// The sequences of one beam search. The first stands for all of them in the scheduler's lists, with
// as many rows as there are sequences: they wait, run and are preempted together. Beams in use have
// the same number of tokens and are in every step together; what they sample is not appended,
// Scheduler::set_beams says how they go on. Their invariant of progress is 0 <= num_computed <=
// tokens.size(), and equality means that the result of their last token is there or on its way.
struct BeamGroup {
  Sequence* first = nullptr;
  std::vector<Sequence*> beams;  // all, those in use in front in the search's order
  int32_t num_in_use = 1;
  std::vector<Sequence*> next;  // scratch

  int32_t width() const { return static_cast<int32_t>(beams.size()); }
};

inline int32_t Sequence::num_rows() const { return group == nullptr ? 1 : group->width(); }
inline int32_t Sequence::num_decoding() const {
  if (group == nullptr) return num_remaining() == 1;
  return group->beams.front()->num_remaining() == 1 ? group->num_in_use : 0;
}

}  // namespace vllm_lite
