// StepPlan and StepResult: what travels between the engine core and a worker, as flat int32 words.
//
// The same bytes go through a direct call, a shared-memory ring or a socket. A plan is a header,
// then sections back to back in the order of the header's counts. 64-bit sections begin at an even
// word. Floats are stored as their bits.
//
// clang-format off
//   section            words                     meaning
//   slot_mapping       2 * num_tokens (int64)    block_id * block_size + offset, where the KV is stored
//   token_ids          num_tokens                -1 - row: the token that `row` sampled last, see below
//   positions          num_tokens
//   query_start        num_seqs + 1              cumulative tokens
//   seq_lens           num_seqs                  tokens with KV after this step (first_token + num_tokens)
//   rows               num_seqs
//   logits_indices     num_logits                index into token_ids of each token that is sampled
//                                                from; those at drafts behind the others, see below
//   table_updates      3 * num_table_updates     (row, index, block): the block tables live in the worker
//   block_copies       2 * num_block_copies      (source, destination), before the forward pass
//   freed_rows         num_freed_rows            nobody uses these rows until they are new again
//   new_rows           17 * num_new_rows         row, RowState (16 words, core/row_state.h)
//   row_lists          num_list_words            the lists of the new rows, see below, then their constraints
//   scored             3 * num_scored            (index into token_ids, token, count): prompt tokens
//                                                whose log-probability is wanted after that token,
//                                                with `count` of the likeliest
//   pooled             3 * num_pooled            (sequence of the step, Pooling, 1 if it ends here)
//   draft_rounds       num_draft_rounds          how many of the logits are of each round of drafts
// clang-format on
//
// Plans are carried out in the order in which they are sent, and each is answered by one result, in
// the same order. With asynchronous scheduling a plan is sent before the result of the one before
// is back. Where it needs a token that its predecessor samples, token_ids has the placeholder -1 -
// row, and the worker puts in what that row sampled last; if the row failed any valid id will do,
// since the engine core throws away what it computes from it.
//
// Drafts are guesses of a sequence's next tokens, computed behind its last known one and sampled
// from as well: first one logit for each sequence that samples, then those at first drafts, at
// second drafts and so on. A logit at a draft counts if the draft is what the sequence's logit
// before it gave, and if that one counts; it sees penalties, masks and all else as if the draft had
// been sampled. What those that do not count give is thrown away.
//
// The lists of a new row, as long as its RowState says: bias ids, bias values, allowed ids, stop
// ids (only with min_total_tokens and without a constraint), history (the sequence's tokens so far,
// only with penalties). After all of them, for each new row with a constraint: a RowConstraint, its
// bytes padded to words, and the sequence's output tokens so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/row_state.h"
#include "core/types.h"

namespace vllm_lite {

constexpr int32_t kPlanMagic = 0x564c5031;    // "VLP1"
constexpr int32_t kResultMagic = 0x564c5231;  // "VLR1"

struct PlanHeader {  // 22 words
  int32_t magic;
  int32_t num_words;  // of the whole plan, header included
  uint32_t step_low;
  uint32_t step_high;
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t num_logits;
  int32_t num_table_updates;
  int32_t num_block_copies;
  int32_t num_freed_rows;
  int32_t num_new_rows;
  int32_t num_list_words;
  int32_t max_query_len;
  int32_t max_seq_len;
  // The most top logprobs that a sampled row asks for; -1: no row asks for any.
  int32_t max_logprobs;
  int32_t num_placeholders;  // negative token_ids
  int32_t num_scored;
  int32_t max_prompt_logprobs;  // the largest count of `scored`
  int32_t num_pooled;
  int32_t num_vectors;  // those of `pooled` that end here
  int32_t num_drafts;   // the last of the logits
  int32_t num_draft_rounds;
};
constexpr int32_t kPlanHeaderWords = 22;
static_assert(sizeof(PlanHeader) == kPlanHeaderWords * sizeof(int32_t));

constexpr int32_t kNewRowWords = 1 + kRowStateWords;
constexpr int32_t kScoredWords = 3;
constexpr int32_t kPooledWords = 3;

struct RowConstraint {
  int32_t row;
  int32_t num_bytes;  // of SamplingParams::constraint
  int32_t num_output;
};
constexpr int32_t kRowConstraintWords = sizeof(RowConstraint) / sizeof(int32_t);
constexpr size_t constraint_words(size_t num_bytes) { return (num_bytes + 3) / 4; }

// Header, then: token_ids[num_logits]; logprobs[num_logits] (float, of the token, before any
// sampling parameter); ranks[num_logits] (1 = most likely); top_ids[num_logits * max_logprobs];
// top_logprobs[num_logits * max_logprobs] (float), most likely first, kNoToken-padded; then of the
// plan's `scored` tokens logprobs, ranks (0: the logits were not finite), top_ids and top_logprobs
// in the same way, max_prompt_logprobs wide; vectors[num_vectors * vector_size] (float), of
// `pooled` those that end, in their order; message bytes. logprobs and ranks of sampled tokens are
// present only if max_logprobs >= 0. A row that failed has kNoToken, or kAllMasked, for its token.
struct ResultHeader {  // 12 words
  int32_t magic;
  int32_t num_words;
  uint32_t step_low;
  uint32_t step_high;
  int32_t num_logits;
  int32_t max_logprobs;
  int32_t error;          // 0: fine; else the step failed and `message` says why
  int32_t message_bytes;  // UTF-8, padded to a word
  int32_t num_scored;
  int32_t max_prompt_logprobs;
  int32_t num_vectors;
  int32_t vector_size;
};
static_assert(sizeof(ResultHeader) == 12 * sizeof(int32_t));

// Log-probabilities of a result, one of each for every token.
struct LogprobSections {
  std::span<const float> logprobs;
  std::span<const int32_t> ranks;
  std::span<const TokenId> top_ids;  // `width` for each token
  std::span<const float> top_logprobs;
  size_t width = 0;
};

// Read access to a result's sections. Throws InternalError if the words are not a well-formed
// result: exactly num_words long, counts not negative, sections adding up to num_words. What it
// accepts can be read in full without leaving `words`, which must outlive the view.
class StepResultView {
 public:
  explicit StepResultView(std::span<const int32_t> words);
  const ResultHeader& header() const { return *header_; }
  uint64_t step() const {
    return static_cast<uint64_t>(header_->step_high) << 32 | header_->step_low;
  }
  std::span<const TokenId> token_ids() const { return token_ids_; }
  std::span<const float> logprobs() const { return sampled_.logprobs; }
  std::span<const int32_t> ranks() const { return sampled_.ranks; }
  // max_logprobs entries of result row `row`; empty if max_logprobs < 1. REQUIRES: row <
  // num_logits.
  std::span<const TokenId> top_ids(int32_t row) const;
  std::span<const float> top_logprobs(int32_t row) const;
  const LogprobSections& scored() const { return scored_; }
  std::span<const float> vector(int32_t index) const;  // REQUIRES: index < num_vectors
  std::span<const char> message() const { return message_; }

 private:
  const ResultHeader* header_;
  std::span<const TokenId> token_ids_;
  LogprobSections sampled_;
  LogprobSections scored_;
  std::span<const float> vectors_;
  std::span<const char> message_;
};

}  // namespace vllm_lite
