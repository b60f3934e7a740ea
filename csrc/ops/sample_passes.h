// The sampler's passes over a row of logits, compiled once per instruction set (sample_isa.cpp),
// and the noise they share (sample_noise.cpp). sample_cpu.cpp puts them together.
//
// Every result is a maximum, a count, a sum of integers or one element's value: none depends on the
// vector width, and the elementwise arithmetic has no fused multiply-add. So every instruction set
// returns the same bits, and so does any order of the elements.
#pragma once

#include <cstdint>

namespace vllm_lite {

// Weights exp(scaled logit) are in (0, 1], kept as integers of this unit: 2^18 of them fit in 64
// bits with room to spare, and sums of subsets agree exactly whatever their order.
constexpr int kWeightBits = 40;

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

constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;
// Philox4x32-10 (Salmon et al., SC 2011) of key (seed low, seed high) and counter (id / 4,
// position, 0, 0); word id % 4.
uint32_t philox_word(uint64_t seed, uint32_t position, uint32_t id);
// -log(-log(u)) for u = (bits + 0.5) / 2^32. Below kMaxGumbel.
double gumbel(uint32_t bits);
constexpr double kMaxGumbel = 23.0;

}  // namespace vllm_lite
