// Random numbers of the sampler in plain IEEE double arithmetic without fused operations and
// without libm, whose last bit differs between machines: a seed gives the same tokens everywhere.
#include <bit>
#include <cstdint>

#include "ops/sample_passes.h"

namespace vllm_lite {
namespace {

// Natural logarithm of a positive normal number, to about 2e-16 relative. x = m * 2^e with m in
// [1/sqrt(2), sqrt(2)); log(m) = 2 atanh(s), s = (m - 1) / (m + 1), whose series at |s| <= 0.172
// needs the terms to s^21.
double portable_log(double x) {
  constexpr double kSqrt2 = 1.4142135623730951, kLn2 = 0.6931471805599453;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  if (m >= kSqrt2) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1.0) / (m + 1.0), s2 = s * s;
  double series = 0.0;
  for (int power = 21; power >= 3; power -= 2) series = (series + 1.0 / power) * s2;
  return exponent * kLn2 + 2.0 * (s + s * series);
}

}  // namespace

uint32_t philox_word(uint64_t seed, uint32_t position, uint32_t id) {
  uint32_t counter[4] = {id / 4, position, 0, 0};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxM0} * counter[0];
    const uint64_t product1 = uint64_t{kPhiloxM1} * counter[2];
    counter[0] = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0;
    counter[1] = static_cast<uint32_t>(product1);
    counter[2] = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1;
    counter[3] = static_cast<uint32_t>(product0);
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return counter[id % 4];
}

double gumbel(uint32_t bits) {
  // Exact: 33 bits.
  const double u = (static_cast<double>(bits) + 0.5) * 0x1p-32;
  return -portable_log(-portable_log(u));
}

}  // namespace vllm_lite
