#include "scheduler/step_builder.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/check.h"

namespace vllm_lite {
namespace {

constexpr size_t kHeaderWords = sizeof(PlanHeader) / sizeof(int32_t);
constexpr size_t kTableUpdateWords = 3;

int32_t narrow(size_t count) { return static_cast<int32_t>(count); }

// Four-byte elements, floats as their bits.
template <typename T>
int32_t* append(int32_t* out, const T* values, size_t count) {
  static_assert(sizeof(T) == sizeof(int32_t));
  if (count > 0) std::memcpy(out, values, count * sizeof(int32_t));
  return out + count;
}

RowState row_state(const Sequence& sequence) {
  const SamplingParams& sampling = *sequence.sampling;
  VL_ASSERT(sampling.bias_ids.size() == sampling.bias_values.size());
  return {
      .sampling = sampling.row,
      .num_bias = narrow(sampling.bias_ids.size()),
      .num_allowed = narrow(sampling.allowed_ids.size()),
      .num_stop = sampling.row.min_total_tokens > 0 && sampling.constraint.empty()
                      ? narrow(sampling.stop_ids.size())
                      : 0,
      .num_history = sampling.needs_history() ? narrow(sequence.tokens.size()) : 0,
  };
}

size_t num_list_words(const RowState& row) {
  return 2 * static_cast<size_t>(row.num_bias) + static_cast<size_t>(row.num_allowed) +
         static_cast<size_t>(row.num_stop) + static_cast<size_t>(row.num_history);
}

int32_t* append_lists(int32_t* out, const Sequence& sequence, const RowState& row) {
  const SamplingParams& sampling = *sequence.sampling;
  out = append(out, sampling.bias_ids.data(), static_cast<size_t>(row.num_bias));
  out = append(out, sampling.bias_values.data(), static_cast<size_t>(row.num_bias));
  out = append(out, sampling.allowed_ids.data(), static_cast<size_t>(row.num_allowed));
  out = append(out, sampling.stop_ids.data(), static_cast<size_t>(row.num_stop));
  return append(out, sequence.tokens.data(), static_cast<size_t>(row.num_history));
}

size_t num_constraint_words(const Sequence& sequence) {
  const std::string& constraint = sequence.sampling->constraint;
  if (constraint.empty()) return 0;
  return kRowConstraintWords + constraint_words(constraint.size()) +
         static_cast<size_t>(sequence.num_output_tokens());
}

int32_t* append_constraint(int32_t* out, const Sequence& sequence) {
  const std::string& constraint = sequence.sampling->constraint;
  const RowConstraint head{sequence.row, narrow(constraint.size()), sequence.num_output_tokens()};
  std::memcpy(out, &head, sizeof(head));
  out += kRowConstraintWords;
  const size_t num_words = constraint_words(constraint.size());
  out[num_words - 1] = 0;  // the last word may be partly filled
  std::memcpy(out, constraint.data(), constraint.size());
  return append(out + num_words, sequence.tokens.data() + sequence.num_prompt_tokens,
                static_cast<size_t>(head.num_output));
}

// The sections of scored tokens and of pooled sequences. Returns the most top logprobs that a
// scored one asks for.
int32_t append_wishes(const Step& step, int32_t* scored, int32_t* pooled) {
  int32_t max_logprobs = 0, token = 0, index = 0;
  for (const ScheduledSequence& part : step.sequences) {
    const Sequence& s = *part.sequence;
    for (int32_t i = 0; i < part.num_scored; ++i) {
      const int32_t position = part.first_scored + i;
      *scored++ = token + position - part.first_token;
      *scored++ = s.tokens[static_cast<size_t>(position) + 1];
      *scored++ = s.num_prompt_logprobs;
      max_logprobs = std::max(max_logprobs, s.num_prompt_logprobs);
    }
    if (s.pooling == Pooling::kMean || (s.pooling == Pooling::kLast && part.ends_prompt())) {
      *pooled++ = index;
      *pooled++ = static_cast<int32_t>(s.pooling);
      *pooled++ = part.ends_prompt();
    }
    token += part.num_tokens + part.num_drafts;
    ++index;
  }
  return max_logprobs;
}

// The first table entry that the worker does not know and may need.
size_t first_unsent(const ScheduledSequence& part) {
  const Sequence& s = *part.sequence;
  return static_cast<size_t>(part.new_row ? s.block_table.num_out_of_window : s.num_blocks_sent);
}

// Drafts in place of placeholders, and the logits at them. Apart from the loop over all tokens,
// which is to be short without drafts.
[[gnu::noinline]] void write_drafts(const Step& step, TokenId* token_ids, int32_t* logits_indices) {
  DraftRounds rounds(step);
  int32_t token = 0;  // of the step
  for (const ScheduledSequence& part : step.sequences) {
    token += part.num_tokens;
    for (int32_t i = 0; i < part.num_drafts; ++i) {
      token_ids[token] = part.sequence->drafts[static_cast<size_t>(i)];
      logits_indices[rounds.next(i)] = token++;
    }
  }
}

}  // namespace

StepBuilder::StepBuilder(const SchedulerConfig& config, int32_t block_size) {
  VL_ASSERT(block_size > 0 && std::has_single_bit(static_cast<uint32_t>(block_size)));
  block_shift_ = std::countr_zero(static_cast<uint32_t>(block_size));
  const auto rows = static_cast<size_t>(config.max_num_seqs);
  const auto tokens = static_cast<size_t>(config.max_num_batched_tokens);
  const auto blocks = static_cast<size_t>(ceil_div(config.max_model_len, block_size));
  const size_t tables = kTableUpdateWords * rows * blocks;
  const size_t per_row = 4 + 1 + 2 + kNewRowWords + kPooledWords;
  const size_t per_token = 5 + kScoredWords;
  words_.reserve(std::min(kMaxReservedWords, kHeaderWords + 1 + kMaxDrafts + per_token * tokens +
                                                 per_row * rows + tables));
}

std::span<const int32_t> StepBuilder::build(const Step& step, uint64_t step_id) {
  const size_t num_tokens = static_cast<size_t>(step.num_tokens);
  const size_t num_seqs = step.sequences.size();
  const size_t num_logits = static_cast<size_t>(step.num_logits());
  size_t num_table_updates = 0;
  size_t num_new_rows = 0;
  size_t list_words = 0;
  size_t all_constraint_words = 0;
  for (const ScheduledSequence& part : step.sequences) {
    num_table_updates += part.sequence->block_table.blocks.size() - first_unsent(part);
    if (part.new_row) {
      ++num_new_rows;
      list_words += num_list_words(row_state(*part.sequence));
      all_constraint_words += num_constraint_words(*part.sequence);
    }
  }

  const size_t slots_at = kHeaderWords;
  const size_t tokens_at = slots_at + 2 * num_tokens;
  const size_t positions_at = tokens_at + num_tokens;
  const size_t starts_at = positions_at + num_tokens;
  const size_t lens_at = starts_at + num_seqs + 1;
  const size_t rows_at = lens_at + num_seqs;
  const size_t logits_at = rows_at + num_seqs;
  const size_t tables_at = logits_at + num_logits;
  const size_t copies_at = tables_at + kTableUpdateWords * num_table_updates;
  const size_t freed_at = copies_at + 2 * step.copies.size();
  const size_t new_rows_at = freed_at + step.freed_rows.size();
  const size_t lists_at = new_rows_at + kNewRowWords * num_new_rows;
  const size_t constraints_at = lists_at + list_words;
  const size_t scored_at = constraints_at + all_constraint_words;
  const size_t pooled_at = scored_at + kScoredWords * static_cast<size_t>(step.num_scored);
  const size_t rounds_at = pooled_at + kPooledWords * static_cast<size_t>(step.num_pooled);
  const size_t num_words = rounds_at + step.draft_rounds.size();
  words_.resize(num_words);
  int32_t* const words = words_.data();

  PlanHeader header{};
  header.magic = kPlanMagic;
  header.num_words = narrow(num_words);
  header.step_low = static_cast<uint32_t>(step_id);
  header.step_high = static_cast<uint32_t>(step_id >> 32);
  header.num_tokens = step.num_tokens;
  header.num_seqs = narrow(num_seqs);
  header.num_logits = step.num_logits();
  header.num_table_updates = narrow(num_table_updates);
  header.num_block_copies = narrow(step.copies.size());
  header.num_freed_rows = narrow(step.freed_rows.size());
  header.num_new_rows = narrow(num_new_rows);
  header.num_list_words = narrow(list_words + all_constraint_words);
  header.num_scored = step.num_scored;
  header.num_pooled = step.num_pooled;
  header.num_vectors = step.num_vectors;
  header.num_drafts = step.num_drafts;
  header.num_draft_rounds = narrow(step.draft_rounds.size());

  int32_t* const slots = words + slots_at;  // two words each
  int32_t* const tokens = words + tokens_at;
  int32_t* const positions = words + positions_at;
  int32_t* logits = words + logits_at;
  int32_t* table_update = words + tables_at;
  int32_t* new_row = words + new_rows_at;
  int32_t* lists = words + lists_at;
  int32_t* constraints = words + constraints_at;
  int32_t token = 0;  // of the step
  int32_t index = 0;
  // The header's, which would be stored for each sequence: its address is taken.
  int32_t max_query_len = 0;
  int32_t max_seq_len = 0;
  int32_t max_logprobs = -1;
  int32_t num_placeholders = 0;
  const int32_t offset_mask = (1 << block_shift_) - 1;
  for (const ScheduledSequence& part : step.sequences) {
    Sequence& s = *part.sequence;
    const BlockId* const table = s.block_table.blocks.data();
    const TokenId* const own_tokens = s.tokens.data();
    const int32_t num_known = s.num_tokens();
    words[starts_at + static_cast<size_t>(index)] = token;
    const int32_t query_len = part.num_tokens + part.num_drafts;
    const int32_t end = part.first_token + query_len;
    words[lens_at + static_cast<size_t>(index)] = end;
    words[rows_at + static_cast<size_t>(index)] = s.row;
    ++index;

    for (int32_t position = part.first_token; position < end; ++position) {
      const int64_t slot =
          (int64_t{table[position >> block_shift_]} << block_shift_) | (position & offset_mask);
      std::memcpy(slots + 2 * token, &slot, sizeof(slot));
      positions[token] = position;
      if (position < num_known) {
        tokens[token] = own_tokens[position];
      } else {
        tokens[token] = -1 - s.row;
        ++num_placeholders;
      }
      ++token;
    }
    max_query_len = std::max(max_query_len, query_len);
    max_seq_len = std::max(max_seq_len, end);
    if (part.samples) {
      *logits++ = token - 1 - part.num_drafts;
      max_logprobs = std::max(max_logprobs, s.sampling->row.num_logprobs);
    }

    const size_t num_blocks = s.block_table.blocks.size();
    for (size_t i = first_unsent(part); i < num_blocks; ++i) {
      const int32_t update[kTableUpdateWords] = {s.row, narrow(i), table[i]};
      table_update = append(table_update, update, kTableUpdateWords);
    }
    s.num_blocks_sent = narrow(num_blocks);
    if (part.new_row) {
      const RowState row = row_state(s);
      *new_row++ = s.row;
      std::memcpy(new_row, &row, sizeof(row));
      new_row += kRowStateWords;
      lists = append_lists(lists, s, row);
      if (!s.sampling->constraint.empty()) constraints = append_constraint(constraints, s);
    }
  }
  words[starts_at + num_seqs] = token;
  int32_t* copy = words + copies_at;
  for (const BlockCopy& c : step.copies) {
    *copy++ = c.source;
    *copy++ = c.destination;
  }
  append(words + freed_at, step.freed_rows.data(), step.freed_rows.size());
  append(words + rounds_at, step.draft_rounds.data(), step.draft_rounds.size());
  if (step.num_drafts > 0) {
    write_drafts(step, words + tokens_at, words + logits_at);
    num_placeholders -= step.num_drafts;
  }
  if (step.num_scored + step.num_pooled > 0) {
    header.max_prompt_logprobs = append_wishes(step, words + scored_at, words + pooled_at);
  }
  header.max_query_len = max_query_len;
  header.max_seq_len = max_seq_len;
  header.max_logprobs = max_logprobs;
  header.num_placeholders = num_placeholders;
  std::memcpy(words, &header, sizeof(header));
  return words_;
}

}  // namespace vllm_lite
