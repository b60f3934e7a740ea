// Weights of a panel, widened in registers. Only for linear_isa.cpp.
//
// Two kinds of arithmetic. Real numbers: with AVX-512-BF16 a step is a pair of columns, whose
// products are summed by one vdpbf16ps; elsewhere a step is one column and a fused multiply-add in
// float32. Integers, which quantised weights are: so is what they are multiplied by
// (linear_kernels.h), a step is a pair of columns in 16 bits each, and a block's sum is exact. A
// float32 input stays as it is, and they are widened to meet it (AsReal).
//
// A format is a struct of static functions over a vector's worth of a panel's rows (`part`):
//   weights(place, step, part)  of a step's columns, without their scale
//   scale(place, i, part)       of the i-th of the block's kScales equal parts
//   minimum(place, part)        where kHasMinimum
// Up to kDirectTokens tokens its weights are widened as they come, for every tile anew; more tokens
// share a widened copy.
#pragma once

#include "core/simd.h"
#include "core/simd_int.h"
#include "ops/linear_kernels.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int kPanelVecs = kLanes / kWidth;

struct RealArithmetic {
  using Sum = FloatVec;
#if defined(VL_ISA_avx512_bf16)
  using Element = BFloat16;
  static constexpr int kStepColumns = 2;
  struct Weights {
    __m512i pairs;
  };
#else
  using Element = float;
  static constexpr int kStepColumns = 1;
  using Weights = FloatVec;
#endif
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
};

typedef int16_t ShortLanes __attribute__((vector_size(kWidth * 4)));

struct IntegerArithmetic {
  using Sum = IntLanes;
  using Element = int16_t;
  static constexpr int kStepColumns = 2;
  using Weights = ShortLanes;
  VL_SIMD IntLanes multiply_add(const Element* input, Weights weights, IntLanes sum) {
    int32_t pair;
    __builtin_memcpy(&pair, input, sizeof(pair));
    return multiply_add_pairs((IntLanes)weights, pair, sum);
  }
};

template <bool kIsInteger>
struct ArithmeticOf : RealArithmetic {};
template <>
struct ArithmeticOf<true> : IntegerArithmetic {};

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
struct Packed : ArithmeticOf<is_quantised(kFormat)> {
  using Arithmetic = ArithmeticOf<is_quantised(kFormat)>;
  static constexpr PanelLayout kLayout = panel_layout(kFormat);
  static constexpr bool kIsInteger = is_quantised(kFormat);
  static constexpr int kSteps = kBlockColumns / Arithmetic::kStepColumns;
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
  VL_SIMD RealArithmetic::Weights weights(Place place, int step, int part) {
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

// A pair of columns.
VL_SIMD ShortLanes byte_pairs(const uint8_t* pairs, int step, int part) {
  typedef int8_t Bytes __attribute__((vector_size(kWidth * 2)));
  Bytes bytes;
  __builtin_memcpy(&bytes, pairs + (step * kLanes + part * kWidth) * 2, sizeof(bytes));
#if defined(VL_ISA_avx512)
  return (ShortLanes)_mm512_maskz_cvtepi8_epi16(~0u, (__m256i)bytes);
#elif defined(VL_ISA_avx2)
  return (ShortLanes)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
  return __builtin_convertvector(bytes, ShortLanes);
#endif
}

struct Int8 : Packed<WeightFormat::kInt8> {
  static constexpr int kScales = 0, kUnroll = kFewSteps;
  static constexpr int64_t kDirectTokens = kCheapDirect;
  VL_SIMD ShortLanes weights(Place place, int step, int part) {
    return byte_pairs(place.block, step, part);
  }
};

struct Q8_0 : Packed<WeightFormat::kQ8_0> {
  static constexpr int kScales = 1, kUnroll = kFewSteps;
  static constexpr int64_t kDirectTokens = kCheapDirect;
  VL_SIMD ShortLanes weights(Place place, int step, int part) {
    return byte_pairs(place.block + kLayout.block_scales, step, part);
  }
  VL_SIMD FloatVec scale(Place place, int, int part) { return half_at(place.block, part); }
};

// ---- nibbles, with up to two bits above them

VL_SIMD ShortLanes load_shorts(const uint8_t* bytes, int part) {
  return (ShortLanes)load_words(bytes, part);
}
// Bits do not come in from the left.
VL_SIMD ShortLanes shift_right(ShortLanes shorts, int bits) {
  typedef uint16_t Unsigned __attribute__((vector_size(kWidth * 4)));
  return bits >= 0 ? (ShortLanes)((Unsigned)shorts >> bits) : shorts << -bits;
}

// Nibbles from -8 on.
VL_SIMD ShortLanes signed_nibbles(const uint8_t* nibbles, int step, int part) {
  return load_shorts(nibbles + step / 4 * kLanes * 4, part) << (12 - step % 4 * 4) >> 12;
}

// `quants`: the block's high bits, then its nibbles.
template <int kHighBits>
VL_SIMD ShortLanes unsigned_numbers(const uint8_t* quants, int step, int part) {
  constexpr int kHighBytes = kHighBits * kBlockColumns / 8 * kLanes;
  const int shift = step % 4 * 4;
  ShortLanes numbers =
      shift_right(load_shorts(quants + kHighBytes + step / 4 * kLanes * 4, part), shift);
  if (shift < 12) numbers &= 15;
  if constexpr (kHighBits > 0) {
    // A word has the high bits of 16 pairs or, where there are two of them, of 8.
    constexpr int kHighPairs = kHighBits == 2 ? 8 : 16;
    const ShortLanes high = load_shorts(quants + step / kHighPairs * kLanes * 4, part);
    constexpr int16_t kMask = ((1 << kHighBits) - 1) << 4;
    numbers |= shift_right(high, step % kHighPairs * kHighBits - 4) & kMask;
  }
  return numbers;
}

struct Q4_0 : Packed<WeightFormat::kQ4_0> {
  static constexpr int kScales = 1, kUnroll = kSteps;
  static constexpr int64_t kDirectTokens = kCheapDirect;
  VL_SIMD ShortLanes weights(Place place, int step, int part) {
    return signed_nibbles(place.block + kLayout.block_scales, step, part);
  }
  VL_SIMD FloatVec scale(Place place, int, int part) { return half_at(place.block, part); }
};

struct Q4_1 : Packed<WeightFormat::kQ4_1> {
  static constexpr int kScales = 1, kUnroll = kSteps;
  static constexpr int64_t kDirectTokens = kCheapDirect;
  VL_SIMD ShortLanes weights(Place place, int step, int part) {
    return unsigned_numbers<0>(place.block + kLayout.block_scales, step, part);
  }
  VL_SIMD FloatVec scale(Place place, int, int part) { return half_at(place.block, part); }
  VL_SIMD FloatVec minimum(Place place, int part) {
    return half_at(place.block + kLanes * 2, part);
  }
};

template <WeightFormat kFormat, int kHighBits>
struct ScaledMinimum : Packed<kFormat> {
  static constexpr int kScales = 1, kUnroll = Packed<kFormat>::kSteps;
  static constexpr int64_t kDirectTokens = kHighBits ? kCostlyDirect : kCheapDirect;
  VL_SIMD ShortLanes weights(Place place, int step, int part) {
    constexpr int kQuants = panel_layout(kFormat).block_scales;
    return unsigned_numbers<kHighBits>(place.block + kQuants, step, part);
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
  VL_SIMD ShortLanes weights(Place place, int step, int part) {
    return unsigned_numbers<2>(place.block + kLayout.block_scales, step, part) - 32;
  }
  VL_SIMD FloatVec scale(Place place, int i, int part) {
    return mul(half_at(place.super, part), int8_at(place.block + i * kLanes, part));
  }
};

// ---- quantised weights for a float32 input

#if !defined(VL_ISA_avx512_bf16)
template <typename Format>
struct AsReal : RealArithmetic {
  using Arithmetic = RealArithmetic;
  static constexpr bool kIsInteger = false, kHasMinimum = Format::kHasMinimum;
  static constexpr bool kIsWidened = false, kIsDense = false;
  static constexpr int kSteps = kBlockColumns, kScales = Format::kScales;
  static constexpr int kUnroll = 2 * Format::kUnroll;
  static constexpr int64_t kDirectTokens = kCostlyDirect;
  static constexpr int64_t kBlockBytes = Format::kBlockBytes;
  VL_SIMD Place place(const uint8_t* panel, int64_t block) { return Format::place(panel, block); }
  VL_SIMD FloatVec weights(Place place, int step, int part) {
    const IntLanes pair = (IntLanes)Format::weights(place, step / 2, part);
    return from_int(step % 2 == 0 ? pair << 16 >> 16 : pair >> 16);
  }
  VL_SIMD FloatVec scale(Place place, int i, int part) { return Format::scale(place, i, part); }
  VL_SIMD FloatVec minimum(Place place, int part) { return Format::minimum(place, part); }
};
#endif

// ---- any of them, once it is widened

// Blocks of [kSteps][row] weights as Weights holds them, then float32 scales and minimum [row].
template <typename Format>
struct Widened : Format::Arithmetic {
  using Arithmetic = typename Format::Arithmetic;
  static constexpr bool kIsInteger = Format::kIsInteger, kHasMinimum = Format::kHasMinimum;
  static constexpr bool kIsWidened = true, kIsDense = true;
  static constexpr int kSteps = Format::kSteps, kScales = Format::kScales, kUnroll = kFewSteps;
  static constexpr int64_t kDirectTokens = kAlwaysDirect;
  static constexpr int64_t kRowBytes = kLanes * 4;
  static constexpr int64_t kBlockBytes = (kSteps + kScales + kHasMinimum) * kRowBytes;
  VL_SIMD Place place(const uint8_t* panel, int64_t block) {
    return {nullptr, panel + block * kBlockBytes};
  }
  VL_SIMD typename Arithmetic::Weights weights(Place place, int step, int part) {
    typename Arithmetic::Weights weights;
    __builtin_memcpy(&weights, lanes_at<float>(place.block + step * kRowBytes, part),
                     sizeof(weights));
    return weights;
  }
  VL_SIMD FloatVec scale(Place place, int i, int part) {
    return load(lanes_at<float>(place.block + (kSteps + i) * kRowBytes, part));
  }
  VL_SIMD FloatVec minimum(Place place, int part) {
    return load(lanes_at<float>(place.block + (kSteps + kScales) * kRowBytes, part));
  }
};

template <typename Format>
void widen_block(const uint8_t* panel, int64_t block, uint8_t* widened) {
  const Place place = Format::place(panel, block);
  for (int part = 0; part < kPanelVecs; ++part) {
    uint8_t* to = widened + part * kWidth * 4;
    const auto put = [&](auto values) {
      __builtin_memcpy(to, &values, sizeof(values));
      to += kLanes * 4;
    };
#pragma GCC unroll 32
    for (int step = 0; step < Format::kSteps; ++step) put(Format::weights(place, step, part));
    if constexpr (Format::kScales > 0) {
      for (int i = 0; i < Format::kScales; ++i) put(Format::scale(place, i, part));
    }
    if constexpr (Format::kHasMinimum) put(Format::minimum(place, part));
  }
}

}  // namespace
}  // namespace vllm_lite::VL_ISA
