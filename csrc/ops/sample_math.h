// The sampler's arithmetic of one element, shared by CPU and CUDA: the same bits on both, and on
// every machine. That is so because the sums are of integers, the floating-point operations are
// IEEE's, each rounded as written, and none comes from a libm. Includers are compiled without
// contraction (-ffp-contract=off, nvcc -fmad=false).
#pragma once

#include <cstdint>
#include <cstring>

#include "core/row_state.h"

#if defined(__CUDACC__)
#define VL_HOST_DEVICE __host__ __device__
#else
#define VL_HOST_DEVICE
#endif

namespace vllm_lite {

template <typename To, typename From>
VL_HOST_DEVICE static inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// A logit and its id as one integer whose ascending order is (logit descending, id ascending).
struct Key {
  uint64_t bits;

  VL_HOST_DEVICE Key(float logit, int32_t id) {
    const uint32_t raw = bits_as<uint32_t>(logit + 0.0f);  // -0 equals +0
    const uint32_t ascending = raw & 0x80000000u ? ~raw : raw | 0x80000000u;
    bits = static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
  }
  VL_HOST_DEVICE explicit Key(uint64_t from) : bits(from) {}
  VL_HOST_DEVICE float logit() const {
    const uint32_t ascending = ~static_cast<uint32_t>(bits >> 32);
    return bits_as<float>(ascending & 0x80000000u ? ascending & 0x7fffffffu : ~ascending);
  }
  VL_HOST_DEVICE int32_t id() const { return static_cast<int32_t>(bits & 0xffffffffu); }
  VL_HOST_DEVICE friend bool operator<(Key a, Key b) { return a.bits < b.bits; }
};

// ---- weights

// Weights exp(scaled logit) are in (0, 1], kept as integers of this unit: 2^18 of them fit in 64
// bits with room to spare, and sums of subsets agree exactly whatever their order.
constexpr int kWeightBits = 40;
// Adding this to a weight in [0, 1] leaves the weight, rounded to kWeightBits, as an integer in the
// low bits of the double.
constexpr double kFixedPoint = 1.5 * static_cast<double>(1ll << (52 - kWeightBits));

// exp(d) for d <= 0, relative error about 1e-7; exactly 1 at 0. exp(d) = 2^n * exp(r), where
// d = n * ln(2) + r, n an integer; d is at least kLeastExponent (polynomial of Cephes' expf).
constexpr float kLeastExponent = -87.0f;
// V: float or a vector of them.
template <typename V>
VL_HOST_DEVICE static inline V exp_parts(V d, V* n) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  *n = (d * 1.44269504088896341f + kRound) - kRound;
  const V r = (d - *n * 0.693359375f) - *n * -2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}

// exp(scaled) for scaled <= 0 in units of 2^-kWeightBits.
VL_HOST_DEVICE static inline int64_t weight_of(float scaled) {
  float n;
  const float fraction = exp_parts(scaled > kLeastExponent ? scaled : kLeastExponent, &n);
  const float power = bits_as<float>((static_cast<int32_t>(n) + 127) << 23);
  return bits_as<int64_t>(static_cast<double>(fraction * power) + kFixedPoint) -
         bits_as<int64_t>(kFixedPoint);
}

// The weight that the likeliest tokens must reach together to hold `p` of `total`.
VL_HOST_DEVICE static inline int64_t top_p_target(float p, int64_t total) {
  const double share = static_cast<double>(p > 0.0f ? p : 0.0f) * static_cast<double>(total);
  const auto floor = static_cast<int64_t>(share);
  return floor + (static_cast<double>(floor) < share);
}

// What a row that failed has for its token: scheduler.h's kNoToken and kAllMasked.
constexpr int32_t kFailedToken = -1, kAllMaskedToken = -2;

// ---- steps of SampleParams

VL_HOST_DEVICE static inline uint64_t seed_of(const RowSampling& row) {
  return uint64_t{row.seed_high} << 32 | row.seed_low;
}

// A row's piece of SampleParams::id_lists.
struct IdLists {
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* allowed_ids;
  const int32_t* stop_ids;

  VL_HOST_DEVICE IdLists(const int32_t* words, const RowState& row)
      : bias_ids(words),
        bias_values(reinterpret_cast<const float*>(words + row.num_bias)),
        allowed_ids(words + 2 * row.num_bias),
        stop_ids(allowed_ids + row.num_allowed) {}
};

// A row's piece of SampleParams::token_masks; nullptr: it has none.
VL_HOST_DEVICE static inline const uint32_t* token_mask_of(const int32_t* masks,
                                                           const int32_t* mask_index,
                                                           int32_t num_masks, int32_t index,
                                                           int32_t vocab_size) {
  if (masks == nullptr || mask_index[index] < 0 || mask_index[index] >= num_masks) return nullptr;
  const int64_t num_words = (static_cast<int64_t>(vocab_size) + 31) / 32;
  return reinterpret_cast<const uint32_t*>(masks) + mask_index[index] * num_words;
}

VL_HOST_DEVICE static inline float penalized(float logit, int32_t output_count, bool in_prompt,
                                             float repetition, float frequency, float presence) {
  const bool in_output = output_count > 0, seen = in_output | in_prompt;
  const float repeated = logit > 0.0f ? logit / repetition : logit * repetition;
  const float kept = seen ? repeated : logit;
  return kept - frequency * static_cast<float>(output_count) - (in_output ? presence : 0.0f);
}

// In float's range, so that the peak's 0 stays 0 and -inf stays -inf.
VL_HOST_DEVICE static inline float temperature_scale(float temperature) {
  constexpr float kLeast = 1.17549435e-38f, kMost = 3.40282347e+38f;
  const float scale = 1.0f / temperature;
  return scale < kLeast ? kLeast : scale > kMost ? kMost : scale;
}

// Natural logarithm of a positive normal number, to about 2e-16 relative. x = m * 2^e with m in
// [1/sqrt(2), sqrt(2)); log(m) = 2 atanh(s), s = (m - 1) / (m + 1), whose series at |s| <= 0.172
// needs the terms to s^21.
VL_HOST_DEVICE static inline double portable_log(double x) {
  constexpr double kSqrt2 = 1.4142135623730951, kLn2 = 0.6931471805599453;
  const uint64_t bits = bits_as<uint64_t>(x);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  double m = bits_as<double>((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  if (m >= kSqrt2) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1.0) / (m + 1.0), s2 = s * s;
  double series = 0.0;
  for (int power = 21; power >= 3; power -= 2) series = (series + 1.0 / power) * s2;
  return exponent * kLn2 + 2.0 * (s + s * series);
}

// The least scaled logit that min_p (above 0) lets through: p >= min_p * p_max, said of logits.
VL_HOST_DEVICE static inline float least_scaled(float min_p) {
  return static_cast<float>(portable_log(min_p < 1.0f ? static_cast<double>(min_p) : 1.0));
}

// log of a sum of weights.
VL_HOST_DEVICE static inline double log_of_weight(int64_t weight) {
  constexpr double kUnit = 1.0 / static_cast<double>(1ll << kWeightBits);
  return portable_log(static_cast<double>(weight) * kUnit);
}
VL_HOST_DEVICE static inline float logprob_of(float logit, float max, double log_total) {
  return static_cast<float>(static_cast<double>(logit) - max - log_total);
}

// ---- noise

constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;

// Philox4x32-10 (Salmon et al., SC 2011) of key (seed low, seed high) and counter (group, position,
// 0, 0): the words of ids 4 * group ... 4 * group + 3.
struct PhiloxWords {
  uint32_t word[4];
};
VL_HOST_DEVICE static inline PhiloxWords philox_words(uint64_t seed, uint32_t position,
                                                      uint32_t group) {
  uint32_t c0 = group, c1 = position, c2 = 0, c3 = 0;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxM0} * c0, product1 = uint64_t{kPhiloxM1} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}
VL_HOST_DEVICE static inline uint32_t philox_word(uint64_t seed, uint32_t position, int32_t id) {
  const PhiloxWords words = philox_words(seed, position, static_cast<uint32_t>(id) / 4);
  const int which = id % 4;
  return which == 0   ? words.word[0]
         : which == 1 ? words.word[1]
         : which == 2 ? words.word[2]
                      : words.word[3];
}

// -log(-log(u)) for u = (bits + 0.5) / 2^32. Below kMaxGumbel.
constexpr double kMaxGumbel = 23.0;
VL_HOST_DEVICE static inline double gumbel(uint32_t bits) {
  // Exact: 33 bits.
  const double u = (static_cast<double>(bits) + 0.5) * (1.0 / 4294967296.0);
  return -portable_log(-portable_log(u));
}

// A token beats the best score so far only if -log(u) < exp(d - best), d its scaled logit, and
// -log(u) >= 1 - u, where 1 - u = (~bits + 0.5) / 2^32. So logarithms are taken of the few tokens
// whose ~bits are below winning_limit(d - best), an upper bound of 2^32 * exp(d - best): the choice
// stays as it is. 2^f <= 1 + f on [0, 1], which is what reading (t + 127) * 2^23 as a float gives.
VL_HOST_DEVICE static inline uint32_t winning_limit(double ahead) {
  const double t = ahead * 1.4426950408889634 + 32.0;
  if (t >= 31.99) return 0xffffffffu;
  if (t <= 0.0) return 1;
  const float bound = bits_as<float>(static_cast<int32_t>((t + 127.0) * 8388608.0) + 1);
  const float limit = bound * 1.0001f + 1.0f;
  return limit < 4294967040.0f ? static_cast<uint32_t>(static_cast<int64_t>(limit)) : 0xffffffffu;
}

}  // namespace vllm_lite
