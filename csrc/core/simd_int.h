// Integers of 8 and 16 bits in the vector layer, and symmetric quantisation; what simd.h says holds
// here.
#pragma once

#include <cstdint>

#include "core/simd.h"

namespace vllm_lite::VL_ISA {

VL_SIMD IntLanes load_int(const int8_t* p) {
#if defined(VL_ISA_avx512)
  return (IntLanes)_mm512_maskz_cvtepi8_epi32(kAllLanes, _mm_loadu_si128((const __m128i*)p));
#elif defined(VL_ISA_avx2)
  return (IntLanes)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  return IntLanes{p[0], p[1], p[2], p[3]};
#endif
}
VL_SIMD FloatVec load(const int8_t* p) { return from_int(load_int(p)); }

// The lanes must be within the range of the type.
VL_SIMD void store_int(int8_t* p, IntLanes a) {
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  const Bytes bytes = __builtin_convertvector(a, Bytes);
  __builtin_memcpy(p, &bytes, sizeof(bytes));
}
VL_SIMD void store_int(int16_t* p, IntLanes a) {
  typedef int16_t Shorts __attribute__((vector_size(kWidth * 2)));
  const Shorts shorts = __builtin_convertvector(a, Shorts);
  __builtin_memcpy(p, &shorts, sizeof(shorts));
}

// sum + the products of two pairs of 16 bits: each lane's, by one that all lanes share. Exact, if
// not all four numbers are -2^15.
VL_SIMD IntLanes multiply_add_pairs(IntLanes pairs, int32_t pair, IntLanes sum) {
#if defined(VL_ISA_avx512_bf16)
  return (IntLanes)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, _mm512_set1_epi32(pair));
#elif defined(VL_ISA_avx512) || defined(VL_ISA_avx2)
#if defined(VL_ISA_avx512)
  sum += (IntLanes)_mm512_maskz_madd_epi16(kAllLanes, (__m512i)pairs, _mm512_set1_epi32(pair));
#else
  sum += (IntLanes)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(pair));
#endif
  // Else GCC computes many products first, in memory, and adds them in an order of its own.
  keep_in_register(sum);
  return sum;
#else
  return sum + (pairs << 16 >> 16) * static_cast<int16_t>(pair) + (pairs >> 16) * (pair >> 16);
#endif
}

// How a vector of floats becomes integers of -most to most, of which integer * scale is the float.
struct Quantisation {
  float scale;    // NaN where a number is not finite
  float inverse;  // of the scale, nearly
  float most;
};

// Of `count` numbers, a multiple of kWidth: the largest in magnitude becomes most or -most, or less
// where it is below 2^-100.
template <typename T>
VL_SIMD Quantisation quantisation_of(const T* from, int count, float most) {
  // As integers, magnitudes are in order, with infinity and then NaN behind all numbers.
  IntLanes largest{};
  for (int i = 0; i < count; i += kWidth) {
    const IntLanes magnitude = bits_of(abs(load(from + i)));
    largest = magnitude > largest ? magnitude : largest;
  }
#pragma GCC unroll 4
  for (int half = kWidth / 2; half > 0; half /= 2) {
    const IntLanes other = __builtin_shuffle(largest, lane_index() ^ half);
    largest = other > largest ? other : largest;
  }
  constexpr int32_t kInfinityBits = 0x7f800000;
  if (largest[0] >= kInfinityBits) return {__builtin_nanf(""), 0.0f, most};
  const float magnitude = float_from_bits(static_cast<uint32_t>(largest[0]));
  const float one = magnitude > 0x1p-100f ? magnitude : 0x1p-100f;
  return {one / most, most / one, most};
}

// To the nearest, ties to even. Where the scale is NaN the integers are of no account, but numbers.
VL_SIMD IntLanes quantise(FloatVec x, const Quantisation& to) {
  const FloatVec scaled = max(mul(x, broadcast(to.inverse)), broadcast(-to.most));
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  const FloatVec magic = broadcast(0x1.8p23f);
  return bits_of(add(scaled, magic)) - bits_of(magic);
}

}  // namespace vllm_lite::VL_ISA
