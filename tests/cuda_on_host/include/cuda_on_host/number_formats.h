// bfloat16, float16 and float8 (e4m3) as bits, converted as a device does: to the nearest, ties to
// even; every NaN becomes the one NaN of the instruction.
#pragma once

#include <bit>
#include <cstdint>

namespace cuda_on_host {

inline float bfloat16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float float16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  // Infinity and NaN keep their fraction; all else is the same digits under another exponent bias.
  const uint32_t scaled = magnitude >= 0x7c00u << 13
                              ? magnitude | 0x7f800000u
                              : std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  return std::bit_cast<float>(sign | scaled);
}

inline uint16_t float_to_float16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= std::bit_cast<uint32_t>(65520.0f)) return sign | 0x7c00;
  if (magnitude < std::bit_cast<uint32_t>(0x1p-14f)) {
    // Subnormal: adding 0.5 leaves a multiple of 2^-24 in the last bits, rounded by the addition.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) & 0xffffu));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

// e4m3: exponent bias 7, no infinity, S.1111.111 is NaN, 448 the largest.
inline float float8_e4m3_to_float(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  const uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(0x7fffffffu);
  const float scaled = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
}

inline uint8_t float_to_float8_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= std::bit_cast<uint32_t>(448.0f)) return sign | 0x7e;
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {
    // Subnormal: adding 2^14 leaves a multiple of 2^-9, rounded by the addition.
    const float sum = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(sum) & 0xfu));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1);
  return static_cast<uint8_t>(sign | ((rounded - (120u << 23)) >> 20));
}

}  // namespace cuda_on_host
