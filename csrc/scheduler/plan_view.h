// Read access to a StepPlan's sections, for C++ tests, benchmarks and tools; the worker reads the
// same words with numpy.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/sampling_params.h"
#include "scheduler/sequence.h"
#include "scheduler/step_plan.h"

namespace vllm_lite {

struct TableUpdate {
  RowId row;
  int32_t index;
  BlockId block;
};

struct ScoredToken {
  int32_t index;  // into token_ids
  TokenId token;
  int32_t count;
};

struct PooledPart {
  int32_t sequence;
  Pooling pooling;
  bool ends;
};

struct NewRow {
  RowId row = -1;
  SamplingParams sampling;
  std::vector<TokenId> history;
  std::vector<TokenId> output;  // only with a constraint
};

class PlanView {
 public:
  // Throws InternalError unless the header's counts add up to exactly the words given, the rounds
  // of drafts to num_drafts and the new rows' lists to num_list_words. `words` must outlive the
  // view.
  explicit PlanView(std::span<const int32_t> words);

  const PlanHeader& header() const { return *header_; }
  uint64_t step() const {
    return static_cast<uint64_t>(header_->step_high) << 32 | header_->step_low;
  }
  int64_t slot(int32_t token) const;  // REQUIRES: token < num_tokens
  std::span<const TokenId> token_ids() const { return token_ids_; }
  std::span<const int32_t> positions() const { return positions_; }
  std::span<const int32_t> query_start() const { return query_start_; }
  std::span<const int32_t> seq_lens() const { return seq_lens_; }
  std::span<const RowId> rows() const { return rows_; }
  std::span<const int32_t> logits_indices() const { return logits_indices_; }
  TableUpdate table_update(int32_t index) const;  // REQUIRES: index < num_table_updates
  std::span<const int32_t> copies() const { return copies_; }  // source, destination, ...
  std::span<const RowId> freed_rows() const { return freed_rows_; }
  std::vector<NewRow> new_rows() const;
  std::vector<ScoredToken> scored() const;
  std::vector<PooledPart> pooled() const;
  std::span<const int32_t> draft_rounds() const { return draft_rounds_; }

 private:
  const PlanHeader* header_;
  std::span<const int32_t> slots_;  // two words each
  std::span<const TokenId> token_ids_;
  std::span<const int32_t> positions_;
  std::span<const int32_t> query_start_;
  std::span<const int32_t> seq_lens_;
  std::span<const RowId> rows_;
  std::span<const int32_t> logits_indices_;
  std::span<const int32_t> table_updates_;  // three words each
  std::span<const int32_t> copies_;
  std::span<const RowId> freed_rows_;
  std::span<const int32_t> new_rows_;  // kNewRowWords each
  std::span<const int32_t> row_lists_;
  std::span<const int32_t> scored_;  // kScoredWords each
  std::span<const int32_t> pooled_;  // kPooledWords each
  std::span<const int32_t> draft_rounds_;
};

}  // namespace vllm_lite
