// Number formats and random numbers of tests, apart from the kernels' own.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace vllm_lite {

// bfloat16.
inline float widen(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline uint16_t narrow(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float widen_half(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline uint16_t narrow_half(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
// FP8 E4M3: a sign, four bits of exponent, three of fraction.
inline float widen_fp8(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float size = exponent == 0 ? std::ldexp(float(fraction), -9)
                                   : std::ldexp(float(8 + fraction), exponent - 10);
  return (bits & 0x80) != 0 ? -size : size;
}

// Half a unit in the last place of x, and a little for what float32 sums lose.
inline float rounding_of(float x) { return std::abs(x) / 250 + 1e-5f; }

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  int32_t integer(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(engine_);
  }
  float normal() { return normal_(engine_); }
  std::vector<uint16_t> bfloat16s(size_t count) {
    std::vector<uint16_t> values(count);
    for (uint16_t& value : values) value = narrow(normal());
    return values;
  }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

}  // namespace vllm_lite
