// What a row's job selects, by which rough measure its segments find the survivors, and which of
// two draws is the better. See sample.cu.
#pragma once

#include "ops/sample_row.cuh"

namespace vllm_lite::sampling {

// What a job selects from a row, likeliest first.
struct Selection {
  const float* x;
  float max;
  float scale;      // of the distances that choose the bins, and of the weights
  int64_t count;    // of tokens, or
  bool by_weight;   // what top_p holds of all weights
  bool with_sum;    // all weights are to be added up
  bool take_all;    // logits of -inf, too
  float most_away;  // by_weight: the scaled distance from which on tokens do not matter
};

// Tokens so unlikely that all of them together weigh less than top_p leaves out: each less than
// 0.15 of the average share. Where that is not much above a weight's unit, none but those that
// weigh nothing.
__device__ float negligible_distance(float top_p, int vocab_size) {
  const float away = logf(static_cast<float>(vocab_size) / (1.0f - fmaxf(top_p, 0.0f))) + 2.0f;
  return away < 26.0f ? away : 32.0f;
}

// False: there is nothing to select.
__device__ bool selection_of(const Row& row, Job job, const SegmentPeak& peak, Selection* out) {
  if (job == kTopIds) {
    if (!row.with_logprobs()) return false;
    *out = {row.raw(), Key(peak.raw).logit(), 1.0f, row.num_top_ids(), false, true, true, 0.0f};
    return true;
  }
  if (row.greedy() || (!row.cut_k() && !row.cut_p())) return false;
  *out = {row.processed(), Key(peak.processed).logit(), 1.0f, 0, false, false, false, 0.0f};
  if (row.cut_k()) {
    out->count = row.sampling().top_k;
  } else {
    out->scale = row.scale();
    out->by_weight = out->with_sum = true;
    out->most_away = negligible_distance(row.sampling().top_p, row.params.vocab_size);
  }
  return true;
}

// The score that a token must beat: the peak survives every cut.
__device__ SegmentDraw peak_draw(const Row& row, uint64_t peak) {
  const int32_t id = Key(peak).id();
  return {gumbel(philox_word(row.seed(), row.position(), id)), id};
}

struct BetterDraw {
  __device__ SegmentDraw operator()(const SegmentDraw& a, const SegmentDraw& b) const {
    return a.score > b.score || (a.score == b.score && a.id < b.id) ? a : b;
  }
};

}  // namespace vllm_lite::sampling
