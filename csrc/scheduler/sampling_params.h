// How a row's next token is chosen. The engine core carries it, the worker's sampler applies it.
#pragma once

#include <string>
#include <vector>

#include "core/row_state.h"
#include "core/types.h"

namespace vllm_lite {

struct SamplingParams {
  RowSampling row;
  std::vector<TokenId> bias_ids;  // logit_bias
  std::vector<float> bias_values;
  std::vector<TokenId> allowed_ids;  // empty: all
  // End the sequence: the model's EOS (unless ignored) and the user's.
  std::vector<TokenId> stop_ids;
  // A grammar and more that the worker makes masks of tokens from, opaque here
  // (vllm_lite/messages.py, TokenConstraint); empty: none. It has its own word about stop ids
  // before min_tokens.
  std::string constraint;

  bool needs_history() const {
    return row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f ||
           row.frequency_penalty != 0.0f;
  }
};

}  // namespace vllm_lite
