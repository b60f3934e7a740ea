// How a row's next token is chosen. The engine core carries it, the worker's sampler applies it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/types.h"

namespace vllm_lite {

// The fixed part, as it travels in a StepPlan (int32 words; see step_plan.h).
struct RowSampling {
  float temperature = 1.0f;  // 0: greedy
  float top_p = 1.0f;
  float min_p = 0.0f;
  int32_t top_k = 0;  // 0: all
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  int32_t num_logprobs = -1;      // -1: none; 0: of the chosen token; n: and of the n most likely
  int32_t min_total_tokens = 0;   // stop_ids are masked until the sequence has this many tokens
  int32_t num_prompt_tokens = 0;  // leading history tokens that the output penalties do not count
  uint32_t seed_low = 0;
  uint32_t seed_high = 0;
};
static_assert(sizeof(RowSampling) == 12 * sizeof(int32_t));

struct SamplingParams {
  RowSampling row;
  std::vector<TokenId> bias_ids;  // logit_bias
  std::vector<float> bias_values;
  std::vector<TokenId> allowed_ids;  // empty: all
  // End the sequence: the model's EOS (unless ignored) and the user's.
  std::vector<TokenId> stop_ids;

  bool needs_history() const {
    return row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f ||
           row.frequency_penalty != 0.0f;
  }
};

}  // namespace vllm_lite
