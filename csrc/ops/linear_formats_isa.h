// Weights of a panel, widened in registers. Only for linear_isa.cpp.
//
// Two kinds of arithmetic. With AVX-512-BF16 a step is a pair of columns, whose products are
// summed by one vdpbf16ps; elsewhere a step is one column and a fused multiply-add in float32. A
// format is a struct of static functions over a vector's worth of a panel's rows (`part`):
//   weights(place, step, part)  of a step's columns, without their scale
//   scale(place, i, part)       of the i-th of the block's kScales equal parts
//   minimum(place, part)        where kHasMinimum
// Up to kDirectTokens tokens its weights are widened as they come, for every tile anew; more tokens
// share a widened copy.
// All numbers of the quantised formats are exact in bfloat16.
#pragma once

#include "core/simd.h"
#include "core/simd_int8.h"
#include "ops/linear_kernels.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int kPanelVecs = kLanes / kWidth;

#if defined(VL_ISA_avx512_bf16)
using Element = BFloat16;
constexpr int kStepColumns = 2;
struct Weights {
  __m512i pairs;
};
#else
using Element = float;
constexpr int kStepColumns = 1;
using Weights = FloatVec;
#endif
constexpr int kSteps = kBlockColumns / kStepColumns;

// sum + input * weights; `input` is a token's, at the step's first column.
VL_SIMD FloatVec multiply_add(const Element* input, Weights weights, FloatVec sum) {
#if defined(VL_ISA_avx512_bf16)
  int32_t pair;
  __builtin_memcpy(&pair, input, sizeof(pair));
  return {(FloatLanes)_mm512_dpbf16_ps((__m512)sum.v, (__m512bh)_mm512_set1_epi32(pair),
                                       (__m512bh)weights.pairs)};
#else
  return fma(broadcast(*input), weights, sum);
#endif
}

// ---- lanes of a panel

// Row `part * kWidth` of a row of 16 elements of T.
template <typename T>
VL_SIMD const T* lanes_at(const uint8_t* bytes, int part) {
  return reinterpret_cast<const T*>(bytes) + part * kWidth;
}

VL_SIMD IntLanes load_words(const uint8_t* bytes, int part) {
  IntLanes words;
  __builtin_memcpy(&words, lanes_at<int32_t>(bytes, part), sizeof(words));
  return words;
}

VL_SIMD IntLanes load_int8(const uint8_t* bytes, int part) {
  return load_int(lanes_at<int8_t>(bytes, part));
}
VL_SIMD FloatVec int8_at(const uint8_t* bytes, int part) {
  return from_int(load_int8(bytes, part));
}
VL_SIMD FloatVec uint8_at(const uint8_t* bytes, int part) {
  return from_int(load_int8(bytes, part) & 255);
}
VL_SIMD FloatVec half_at(const uint8_t* bytes, int part) {
  return load(lanes_at<Float16>(bytes, part));
}

// ---- where a block is

struct Place {
  const uint8_t* super;  // the header that it shares
  const uint8_t* block;
};

constexpr int kDenseBytes = kBlockColumns * kLanes * 2;

template <WeightFormat kFormat>
struct Packed {
  static constexpr PanelLayout kLayout = panel_layout(kFormat);
  static constexpr bool kHasMinimum = has_minimum(kFormat);
  static constexpr bool kIsWidened = false, kIsDense = kLayout.block_quants >= kDenseBytes;
  static constexpr int64_t kBlockBytes = kLayout.block_bytes();
  VL_SIMD Place place(const uint8_t* panel, int64_t block) {
    return {panel + kLayout.super_offset(block), panel + kLayout.block_offset(block)};
  }
};

// ---- dense weights

// Tokens up to which widening in registers was faster: always where it is a shift; where it takes
// more, until four or five tiles would do it again.
constexpr int64_t kAlwaysDirect = kRangeTokens;
constexpr int64_t kCheapDirect = 24;
constexpr int64_t kCostlyDirect = 4;

// Steps that the tile's loop unrolls; formats whose shifts must be constants unroll them all.
constexpr int kFewSteps = 4;

template <typename T, WeightFormat kFormat>
struct DenseOf : Packed<kFormat> {
  static constexpr int kScales = 0, kUnroll = kFewSteps;
  static constexpr int64_t kDirectTokens =
      kFormat == WeightFormat::kFloat16 ? kCheapDirect : kAlwaysDirect;
  VL_SIMD Weights weights(Place place, int step, int part) {
#if defined(VL_ISA_avx512_bf16)
    return {_mm512_loadu_si512(place.block + step * kLanes * 4 + part)};
#else
    if constexpr (sizeof(T) == 4) {
      return load(lanes_at<T>(place.block + step * kLanes * 4, part));
    } else {
      const IntLanes pairs = load_words(place.block + step / 2 * kLanes * 4, part);
      return step % 2 == 0 ? widen_lower(pairs, T{}) : widen_upper(pairs, T{});
    }
#endif
  }
};
using DenseFloat32 = DenseOf<float, WeightFormat::kFloat32>;
using DenseBFloat16 = DenseOf<BFloat16, WeightFormat::kBFloat16>;
using DenseFloat16 = DenseOf<Float16, WeightFormat::kFloat16>;

// ---- bytes

VL_SIMD Weights int8_weights(const uint8_t* columns, int step, int part) {
  const uint8_t* first = columns + step * kStepColumns * kLanes;
#if defined(VL_ISA_avx512_bf16)
  // The lower half of a float32 of such a number is 0: two of them make a pair as they are.
  const IntLanes lower = bits_of(int8_at(first, part)), upper = bits_of(int8_at(first + kLanes, 0));
  return {_mm512_or_si512(_mm512_maskz_srli_epi32(kAllLanes, (__m512i)lower, 16), (__m512i)upper)};
#else
  return int8_at(first, part);
#endif
}

struct Int8 : Packed<WeightFormat::kInt8> {
  static constexpr int kScales = 0, kUnroll = kFewSteps;
  static constexpr int64_t kDirectTokens = kCheapDirect;
  VL_SIMD Weights weights(Place place, int step, int part) {
    return int8_weights(place.block, step, part);
  }
};

struct Q8_0 : Packed<WeightFormat::kQ8_0> {
  static constexpr int kScales = 1, kUnroll = kFewSteps;
  static constexpr int64_t kDirectTokens = kCheapDirect;
  VL_SIMD Weights weights(Place place, int step, int part) {
    return int8_weights(place.block + kLayout.block_scales, step, part);
  }
  VL_SIMD FloatVec scale(Place place, int, int part) { return half_at(place.block, part); }
};

// ---- nibbles, with up to two bits above them

#if defined(VL_ISA_avx512_bf16)
// bfloat16 of first, first + 1, ..., first + 31.
VL_SIMD __m512i bfloat16_table(int first) {
  const IntLanes even = lane_index() * 2 + first;
  const IntLanes lower = bits_of(from_int(even)), upper = bits_of(from_int(even + 1));
  return _mm512_or_si512(_mm512_maskz_srli_epi32(kAllLanes, (__m512i)lower, 16), (__m512i)upper);
}
// The table of the numbers of 4 bits: a fifth bit makes no difference.
VL_SIMD __m512i bfloat16_table_of_nibbles(int first) {
  const __m512i table = bfloat16_table(first);
  return _mm512_maskz_shuffle_i64x2(0xff, table, table, 0x44);
}
// Both halves of each word.
VL_SIMD __m512i shift_right(__m512i words, int bits) {
  return bits >= 0 ? _mm512_maskz_srli_epi16(~0u, words, static_cast<unsigned>(bits))
                   : _mm512_maskz_slli_epi16(~0u, words, static_cast<unsigned>(-bits));
}
#endif

// `quants`: the block's high bits, then its nibbles. The numbers are from -kOffset on.
template <int kHighBits, int kOffset>
VL_SIMD Weights nibble_weights(const uint8_t* quants, int step, int part) {
  constexpr int kHighBytes = kHighBits * kBlockColumns / 8 * kLanes;
  constexpr int kMask = ((1 << kHighBits) - 1) << 4;
  const int pair = step * kStepColumns / 2;
  const int nibble_shift = pair % 4 * 4;
  // A word has the high bits of 16 pairs or, where there are two of them, of 8.
  constexpr int kHighPairs = kHighBits == 2 ? 8 : 16;
  const int high_word = pair / kHighPairs, high_shift = pair % kHighPairs * kHighBits - 4;
  const IntLanes words = load_words(quants + kHighBytes + pair / 4 * kLanes * 4, part);
#if defined(VL_ISA_avx512_bf16)
  // vpermw looks 32 numbers up by the low 5 bits of each half; what is above is ignored.
  __m512i index = shift_right((__m512i)words, nibble_shift);
  if constexpr (kHighBits == 0) {
    return {_mm512_permutexvar_epi16(index, bfloat16_table_of_nibbles(-kOffset))};
  } else {
    const __m512i high = (__m512i)load_words(quants + high_word * kLanes * 4, part);
    // Bits of the mask from the second, the others from the first.
    index = _mm512_ternarylogic_epi32(index, shift_right(high, high_shift),
                                      _mm512_set1_epi16(kMask), 0xd8);
    if constexpr (kHighBits == 1) {
      return {_mm512_permutexvar_epi16(index, bfloat16_table(-kOffset))};
    } else {
      return {
          _mm512_permutex2var_epi16(bfloat16_table(-kOffset), index, bfloat16_table(32 - kOffset))};
    }
  }
#else
  const int half = step % 2 * 16;
  IntLanes number = words >> (nibble_shift + half) & 15;
  if constexpr (kHighBits > 0) {
    const IntLanes high = load_words(quants + high_word * kLanes * 4, part);
    const int shift = high_shift + half;
    number |= (shift >= 0 ? high >> shift : high << -shift) & kMask;
  }
  return from_int(kOffset == 0 ? number : number - kOffset);
#endif
}

struct Q4_0 : Packed<WeightFormat::kQ4_0> {
  static constexpr int kScales = 1, kUnroll = kSteps;
  static constexpr int64_t kDirectTokens = kCheapDirect;
  VL_SIMD Weights weights(Place place, int step, int part) {
    return nibble_weights<0, 8>(place.block + kLayout.block_scales, step, part);
  }
  VL_SIMD FloatVec scale(Place place, int, int part) { return half_at(place.block, part); }
};

struct Q4_1 : Packed<WeightFormat::kQ4_1> {
  static constexpr int kScales = 1, kUnroll = kSteps;
  static constexpr int64_t kDirectTokens = kCheapDirect;
  VL_SIMD Weights weights(Place place, int step, int part) {
    return nibble_weights<0, 0>(place.block + kLayout.block_scales, step, part);
  }
  VL_SIMD FloatVec scale(Place place, int, int part) { return half_at(place.block, part); }
  VL_SIMD FloatVec minimum(Place place, int part) {
    return half_at(place.block + kLanes * 2, part);
  }
};

template <WeightFormat kFormat, int kHighBits>
struct ScaledMinimum : Packed<kFormat> {
  static constexpr int kScales = 1, kUnroll = kSteps;
  static constexpr int64_t kDirectTokens = kHighBits ? kCostlyDirect : kCheapDirect;
  VL_SIMD Weights weights(Place place, int step, int part) {
    constexpr int kQuants = panel_layout(kFormat).block_scales;
    return nibble_weights<kHighBits, 0>(place.block + kQuants, step, part);
  }
  VL_SIMD FloatVec scale(Place place, int, int part) {
    return mul(half_at(place.super, part), uint8_at(place.block, part));
  }
  VL_SIMD FloatVec minimum(Place place, int part) {
    return sub(zero(),
               mul(half_at(place.super + kLanes * 2, part), uint8_at(place.block + kLanes, part)));
  }
};
using Q4_K = ScaledMinimum<WeightFormat::kQ4_K, 0>;
using Q5_K = ScaledMinimum<WeightFormat::kQ5_K, 1>;

struct Q6_K : Packed<WeightFormat::kQ6_K> {
  static constexpr int kScales = 2, kUnroll = kSteps / 2;
  static constexpr int64_t kDirectTokens = kCostlyDirect;
  VL_SIMD Weights weights(Place place, int step, int part) {
    return nibble_weights<2, 32>(place.block + kLayout.block_scales, step, part);
  }
  VL_SIMD FloatVec scale(Place place, int i, int part) {
    return mul(half_at(place.super, part), int8_at(place.block + i * kLanes, part));
  }
};

// ---- any of them, once it is widened

// Blocks of [kSteps][row] weights as Weights holds them, then float32 scales and minimum [row].
template <int kNumScales, bool kMinimum>
struct Widened {
  static constexpr int kScales = kNumScales, kUnroll = kFewSteps;
  static constexpr int64_t kDirectTokens = kAlwaysDirect;
  static constexpr bool kHasMinimum = kMinimum;
  static constexpr bool kIsWidened = true, kIsDense = true;
  static constexpr int64_t kRowBytes = kLanes * 4;
  static constexpr int64_t kBlockBytes = (kSteps + kScales + kHasMinimum) * kRowBytes;
  VL_SIMD Place place(const uint8_t* panel, int64_t block) {
    return {nullptr, panel + block * kBlockBytes};
  }
  VL_SIMD Weights weights(Place place, int step, int part) {
#if defined(VL_ISA_avx512_bf16)
    return {_mm512_loadu_si512(place.block + step * kRowBytes + part)};
#else
    return load(lanes_at<float>(place.block + step * kRowBytes, part));
#endif
  }
  VL_SIMD FloatVec scale(Place place, int i, int part) {
    return load(lanes_at<float>(place.block + (kSteps + i) * kRowBytes, part));
  }
  VL_SIMD FloatVec minimum(Place place, int part) {
    return load(lanes_at<float>(place.block + (kSteps + kScales) * kRowBytes, part));
  }
};

template <typename Format>
using WidenedOf = Widened<Format::kScales, Format::kHasMinimum>;

template <typename Format>
void widen_block(const uint8_t* panel, int64_t block, uint8_t* widened) {
  using To = WidenedOf<Format>;
  const Place place = Format::place(panel, block);
  for (int part = 0; part < kPanelVecs; ++part) {
    float* to = reinterpret_cast<float*>(widened) + part * kWidth;
    const auto put = [&](int row, FloatVec values) { store(to + row * kLanes, values); };
#pragma GCC unroll 32
    for (int step = 0; step < kSteps; ++step) {
      const Weights weights = Format::weights(place, step, part);
#if defined(VL_ISA_avx512_bf16)
      put(step, from_bits((IntLanes)weights.pairs));
#else
      put(step, weights);
#endif
    }
    if constexpr (Format::kScales > 0) {
      for (int i = 0; i < Format::kScales; ++i) put(kSteps + i, Format::scale(place, i, part));
    }
    if constexpr (Format::kHasMinimum) put(kSteps + To::kScales, Format::minimum(place, part));
  }
}

}  // namespace
}  // namespace vllm_lite::VL_ISA
