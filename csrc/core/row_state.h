// What the worker keeps of a row: a step plan brings it, the sampler's kernels read it, both as the
// same int32 words.
#pragma once

#include <cstdint>

namespace vllm_lite {

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

// With the lengths of the row's lists.
struct RowState {
  RowSampling sampling;
  int32_t num_bias = 0;
  int32_t num_allowed = 0;  // 0: all are allowed
  int32_t num_stop = 0;     // 0 without min_total_tokens
  int32_t num_history = 0;  // 0 without penalties
};
constexpr int kRowStateWords = 16;
static_assert(sizeof(RowState) == kRowStateWords * sizeof(int32_t));

}  // namespace vllm_lite
