// The sampler's passes over a row of logits, compiled once per instruction set (sample_isa.cpp).
// sample_cpu.cpp puts them together.
//
// Every result is a maximum, a count, a sum of integers or one element's value: none depends on the
// vector width, and the elementwise arithmetic has no fused multiply-add. So every instruction set
// returns the same bits, and so does any order of the elements.
#pragma once

#include <cstdint>

namespace vllm_lite {

// The likeliest candidate of a row.
struct Peak {
  float value;  // -inf if there is none
  int32_t id;   // the lowest id with that value, or -1
  bool broken;  // the row holds a NaN or +inf
};

// The choice among the survivors: x > cut_value, or x == cut_value and id <= cut_id; and a scaled
// logit of at least min_scaled. The peak survives.
struct DrawParams {
  const float* x;  // [size], without NaN or +inf
  int32_t size;
  Peak peak;
  float scale;      // scaled logit = (x - peak.value) * scale
  float cut_value;  // -inf: no cut
  int32_t cut_id;
  float min_scaled;
  uint64_t seed;
  uint32_t position;
};

struct SamplePasses {
  Peak (*find_peak)(const float* x, int64_t size);
  // The sum of exp((x - max) * scale) in units of 2^-kWeightBits.
  int64_t (*sum_weights)(const float* x, int64_t size, float max, float scale);
  // The same weights one by one.
  void (*weights)(const float* x, int64_t size, float max, float scale, int64_t* out);
  int64_t (*count_above)(const float* x, int64_t size, float threshold);
  // Appends the ids of x > threshold, from `begin` on and in ascending order, to ids[*count...]
  // until the row ends or fewer than kCollectRoom entries of `capacity` are free. Returns where it
  // stopped.
  int64_t (*collect_above)(const float* x, int64_t begin, int64_t size, float threshold,
                           int32_t* ids, int64_t capacity, int64_t* count);
  // Repetition penalty on what the prompt or the output holds, then frequency and presence on the
  // output.
  void (*penalize)(float* x, int64_t size, const int32_t* output_counts, const uint8_t* prompt_mask,
                   float repetition, float frequency, float presence);
  // The survivor with the largest scaled logit + gumbel(philox_word(seed, position, id)), the
  // lowest id among equals.
  int32_t (*draw)(const DrawParams& params);
};
constexpr int64_t kCollectRoom = 64;

namespace portable {
extern const SamplePasses kSamplePasses;
}
namespace avx2 {
extern const SamplePasses kSamplePasses;
}
namespace avx512 {
extern const SamplePasses kSamplePasses;
}

}  // namespace vllm_lite
