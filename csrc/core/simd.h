// The vector layer of the CPU kernels: FloatVec, kWidth floats of the instruction set VL_ISA.
//
// Only for files named *_isa.cpp. Everything here is `static inline` and forced inline, in the
// instruction set's own namespace, so that no symbol can be shared between the objects of two sets.
// Every operation rounds as written (isa.cmake turns contraction off): a*b + c is two roundings,
// fma(a, b, c) one where the processor has it. Results may differ between instruction sets, never
// between two calls in one. GCC's vector extension does the plain arithmetic; intrinsics only where
// it has no word for an instruction.
#pragma once

#include <cstdint>

// Each set has what those before it have; VL_ISA stays the set itself.
#if defined(VL_ISA_amx)
#define VL_ISA_avx512_bf16 1
#endif
#if defined(VL_ISA_avx512_bf16)
#define VL_ISA_avx512 1
#endif

#if defined(VL_ISA_avx2) || defined(VL_ISA_avx512)
#include <immintrin.h>
#endif

#define VL_SIMD static inline __attribute__((always_inline))

namespace vllm_lite::VL_ISA {

#if defined(VL_ISA_avx512)
constexpr int kWidth = 16;
// Unmasked AVX-512 intrinsics make GCC 12 warn of an uninitialised operand (its PR 105593).
constexpr __mmask16 kAllLanes = 0xffff;
#elif defined(VL_ISA_avx2)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float FloatLanes __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntLanes __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfLanes __attribute__((vector_size(kWidth * 2)));

struct FloatVec {
  FloatLanes v;
};

// Storage types; arithmetic is in float32.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// ---- lanes and bits

VL_SIMD FloatVec broadcast(float x) { return {x - FloatLanes{}}; }
VL_SIMD FloatVec zero() { return {FloatLanes{}}; }
VL_SIMD IntLanes broadcast_int(int32_t x) { return x - IntLanes{}; }
VL_SIMD IntLanes bits_of(FloatVec a) { return (IntLanes)a.v; }
VL_SIMD FloatVec from_bits(IntLanes bits) { return {(FloatLanes)bits}; }

// 0, 1, 2, ...
VL_SIMD IntLanes lane_index() {
#if defined(VL_ISA_avx512)
  return IntLanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(VL_ISA_avx2)
  return IntLanes{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return IntLanes{0, 1, 2, 3};
#endif
}

// GCC would extend the halves of the vector apart and join them.
VL_SIMD IntLanes zero_extend(HalfLanes a) {
#if defined(VL_ISA_avx512)
  return (IntLanes)_mm512_maskz_cvtepu16_epi32(kAllLanes, (__m256i)a);
#elif defined(VL_ISA_avx2)
  return (IntLanes)_mm256_cvtepu16_epi32((__m128i)a);
#else
  return __builtin_convertvector(a, IntLanes);
#endif
}

// Has the compiler hold a value that is used several times in a register, where it would rather
// load it anew each time.
template <typename Lanes>
VL_SIMD void keep_in_register([[maybe_unused]] Lanes& a) {
#if defined(VL_ISA_avx512)
  asm("" : "+v"(a));
#elif defined(VL_ISA_avx2)
  asm("" : "+x"(a));
#endif
}

VL_SIMD FloatVec from_int(IntLanes a) { return {__builtin_convertvector(a, FloatLanes)}; }

// mask lanes are 0 or -1, as comparisons of lanes give them.
VL_SIMD FloatVec select(IntLanes mask, FloatVec if_set, FloatVec if_clear) {
  return {mask ? if_set.v : if_clear.v};
}

// ---- arithmetic

VL_SIMD FloatVec add(FloatVec a, FloatVec b) { return {a.v + b.v}; }
VL_SIMD FloatVec sub(FloatVec a, FloatVec b) { return {a.v - b.v}; }
VL_SIMD FloatVec mul(FloatVec a, FloatVec b) { return {a.v * b.v}; }
VL_SIMD FloatVec div(FloatVec a, FloatVec b) { return {a.v / b.v}; }
VL_SIMD FloatVec abs(FloatVec a) { return from_bits(bits_of(a) & 0x7fffffff); }

// a * b + c
VL_SIMD FloatVec fma(FloatVec a, FloatVec b, FloatVec c) {
#if defined(VL_ISA_avx512)
  return {(FloatLanes)_mm512_fmadd_ps((__m512)a.v, (__m512)b.v, (__m512)c.v)};
#elif defined(VL_ISA_avx2)
  return {(FloatLanes)_mm256_fmadd_ps((__m256)a.v, (__m256)b.v, (__m256)c.v)};
#else
  return {a.v * b.v + c.v};
#endif
}

// fma of one float; the same rounding as a lane of the vector one.
VL_SIMD float fma(float a, float b, float c) {
#if defined(VL_ISA_avx512) || defined(VL_ISA_avx2)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// max(a, b) is b where either is NaN: max(constant, x) keeps a NaN of x. Likewise min.
VL_SIMD FloatVec max(FloatVec a, FloatVec b) {
#if defined(VL_ISA_avx512)
  return {(FloatLanes)_mm512_maskz_max_ps(kAllLanes, (__m512)a.v, (__m512)b.v)};
#elif defined(VL_ISA_avx2)
  return {(FloatLanes)_mm256_max_ps((__m256)a.v, (__m256)b.v)};
#else
  return {a.v > b.v ? a.v : b.v};
#endif
}
VL_SIMD FloatVec min(FloatVec a, FloatVec b) {
#if defined(VL_ISA_avx512)
  return {(FloatLanes)_mm512_maskz_min_ps(kAllLanes, (__m512)a.v, (__m512)b.v)};
#elif defined(VL_ISA_avx2)
  return {(FloatLanes)_mm256_min_ps((__m256)a.v, (__m256)b.v)};
#else
  return {a.v < b.v ? a.v : b.v};
#endif
}

VL_SIMD FloatVec sqrt(FloatVec a) {
#if defined(VL_ISA_avx512)
  return {(FloatLanes)_mm512_maskz_sqrt_ps(kAllLanes, (__m512)a.v)};
#elif defined(VL_ISA_avx2)
  return {(FloatLanes)_mm256_sqrt_ps((__m256)a.v)};
#else
  for (int i = 0; i < kWidth; ++i) a.v[i] = __builtin_sqrtf(a.v[i]);
  return a;
#endif
}

// Lanes are folded in halves: always the same tree.
VL_SIMD float reduce_add(FloatVec a) {
#pragma GCC unroll 4
  for (int half = kWidth / 2; half > 0; half /= 2) {
    a.v += __builtin_shuffle(a.v, lane_index() ^ half);
  }
  return a.v[0];
}
VL_SIMD float reduce_max(FloatVec a) {
#pragma GCC unroll 4
  for (int half = kWidth / 2; half > 0; half /= 2) {
    a = max(a, {__builtin_shuffle(a.v, lane_index() ^ half)});
  }
  return a.v[0];
}

// ---- one element

VL_SIMD float float_from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
VL_SIMD uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

VL_SIMD float to_float(float x) { return x; }
VL_SIMD float to_float(BFloat16 x) { return float_from_bits(static_cast<uint32_t>(x.bits) << 16); }
VL_SIMD float to_float(Float16 x) {
#if defined(VL_ISA_avx512) || defined(VL_ISA_avx2)
  return _cvtsh_ss(x.bits);
#else
  // Exponent and mantissa in place, then a power of two sets the exponent's bias; exact for
  // subnormals.
  const uint32_t magnitude = x.bits & 0x7fffu;
  const float scaled = float_from_bits(magnitude << 13) * 0x1p112f;
  const uint32_t bits = magnitude >= 0x7c00u ? 0x7f800000u | (magnitude << 13) : float_bits(scaled);
  return float_from_bits(bits | (x.bits & 0x8000u) << 16);
#endif
}

// Rounding to nearest even; a NaN stays a NaN.
VL_SIMD void from_float(float x, float& out) { out = x; }
VL_SIMD void from_float(float x, BFloat16& out) {
  const uint32_t bits = float_bits(x);
  out.bits = static_cast<uint16_t>(x != x ? bits >> 16 | 0x40u
                                          : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
VL_SIMD void from_float(float x, Float16& out) {
#if defined(VL_ISA_avx512) || defined(VL_ISA_avx2)
  out.bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14 the unit is 2^-24, which is the unit of a float in [0.5, 1).
    half = float_bits(float_from_bits(magnitude) + 0.5f) - float_bits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
#endif
}

// ---- load and store
// No alignment is asked for. The *_partial forms touch only the first `count` elements, 0..kWidth;
// loading gives 0 in the other lanes.

VL_SIMD FloatVec load(const float* p) {
  FloatVec a;
  __builtin_memcpy(&a.v, p, sizeof(a.v));
  return a;
}
VL_SIMD void store(float* p, FloatVec a) { __builtin_memcpy(p, &a.v, sizeof(a.v)); }

VL_SIMD FloatVec load(const BFloat16* p) {
  HalfLanes halves;
  __builtin_memcpy(&halves, p, sizeof(halves));
  return from_bits(zero_extend(halves) << 16);
}
// The lower and upper element of each lane of 32 bits that holds two.
VL_SIMD FloatVec widen_lower(IntLanes pairs, BFloat16) { return from_bits(pairs << 16); }
VL_SIMD FloatVec widen_upper(IntLanes pairs, BFloat16) {
  return from_bits(pairs & static_cast<int32_t>(0xffff0000u));
}
VL_SIMD void store(BFloat16* p, FloatVec a) {
#if defined(VL_ISA_avx512_bf16)
  // A subnormal number becomes 0.
  const __m256bh halves = _mm512_maskz_cvtneps_pbh(kAllLanes, (__m512)a.v);
#else
  const IntLanes bits = bits_of(a);
  const IntLanes rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const IntLanes quiet = bits >> 16 | 0x40;
  const HalfLanes halves =
      __builtin_convertvector((a.v != a.v ? quiet : rounded) & 0xffff, HalfLanes);
#endif
  __builtin_memcpy(p, &halves, sizeof(halves));
}

VL_SIMD FloatVec widen(HalfLanes halves, Float16) {
#if defined(VL_ISA_avx512)
  return {(FloatLanes)_mm512_maskz_cvtph_ps(kAllLanes, (__m256i)halves)};
#elif defined(VL_ISA_avx2)
  return {(FloatLanes)_mm256_cvtph_ps((__m128i)halves)};
#else
  // As to_float.
  const IntLanes bits = __builtin_convertvector(halves, IntLanes);
  const IntLanes magnitude = bits & 0x7fff;
  const FloatVec finite = mul(from_bits(magnitude << 13), broadcast(0x1p112f));
  const FloatVec special = from_bits(magnitude << 13 | 0x7f800000);
  return from_bits(bits_of(select(magnitude >= 0x7c00, special, finite)) | (bits & 0x8000) << 16);
#endif
}
VL_SIMD FloatVec load(const Float16* p) {
  HalfLanes halves;
  __builtin_memcpy(&halves, p, sizeof(halves));
  return widen(halves, Float16{});
}
VL_SIMD FloatVec widen_lower(IntLanes pairs, Float16) {
  return widen(__builtin_convertvector(pairs & 0xffff, HalfLanes), Float16{});
}
VL_SIMD FloatVec widen_upper(IntLanes pairs, Float16) {
  return widen(__builtin_convertvector(pairs >> 16 & 0xffff, HalfLanes), Float16{});
}
VL_SIMD void store(Float16* p, FloatVec a) {
#if defined(VL_ISA_avx512)
  _mm256_storeu_si256(
      (__m256i*)p,
      _mm512_maskz_cvtps_ph(kAllLanes, (__m512)a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(VL_ISA_avx2)
  _mm_storeu_si128((__m128i*)p,
                   _mm256_cvtps_ph((__m256)a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < kWidth; ++i) from_float(a.v[i], p[i]);
#endif
}

VL_SIMD FloatVec load_partial(const float* p, int count) {
#if defined(VL_ISA_avx512)
  return {(FloatLanes)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p)};
#elif defined(VL_ISA_avx2)
  const IntLanes mask = lane_index() < count;
  return {(FloatLanes)_mm256_maskload_ps(p, (__m256i)mask)};
#else
  FloatVec a = zero();
  for (int i = 0; i < count; ++i) a.v[i] = p[i];
  return a;
#endif
}
VL_SIMD void store_partial(float* p, FloatVec a, int count) {
#if defined(VL_ISA_avx512)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), (__m512)a.v);
#elif defined(VL_ISA_avx2)
  const IntLanes mask = lane_index() < count;
  _mm256_maskstore_ps(p, (__m256i)mask, (__m256)a.v);
#else
  for (int i = 0; i < count; ++i) p[i] = a.v[i];
#endif
}

// 16-bit types go through a full vector on the stack.
#define VL_PARTIAL_OF_HALVES(T)                             \
  VL_SIMD FloatVec load_partial(const T* p, int count) {    \
    T whole[kWidth] = {};                                   \
    for (int i = 0; i < count; ++i) whole[i] = p[i];        \
    return load(whole);                                     \
  }                                                         \
  VL_SIMD void store_partial(T* p, FloatVec a, int count) { \
    T whole[kWidth];                                        \
    store(whole, a);                                        \
    for (int i = 0; i < count; ++i) p[i] = whole[i];        \
  }
VL_PARTIAL_OF_HALVES(BFloat16)
VL_PARTIAL_OF_HALVES(Float16)
#undef VL_PARTIAL_OF_HALVES

// ---- exponentials

struct ReducedExp {
  FloatVec tail;  // e^r - 1, |r| <= ln(2)/2
  IntLanes n;
};

// 2^n, which must be a normal number.
VL_SIMD FloatVec power_of_two(IntLanes n) { return from_bits((n + 127) << 23); }

// e^x = 2^n (1 + tail), for x in [-87.34, 89] or NaN. The polynomial is minimax for (e^r - 1 - r) /
// r^2; its error is 0.05 units in the last place of e^r.
VL_SIMD ReducedExp reduce_exp(FloatVec x) {
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  const FloatVec magic = broadcast(0x1.8p23f);
  const FloatVec shifted = fma(x, broadcast(0x1.715476p0f), magic);
  const FloatVec n = sub(shifted, magic);
  const IntLanes n_int = bits_of(shifted) - bits_of(magic);
  // ln(2) in two parts; the first has few enough bits that n times it is exact.
  FloatVec r = sub(x, mul(n, broadcast(0x1.63p-1f)));
  r = sub(r, mul(n, broadcast(-0x1.bd0106p-13f)));
  FloatVec q = broadcast(1.381453999e-03f);
  q = fma(q, r, broadcast(8.368745246e-03f));
  q = fma(q, r, broadcast(4.166839080e-02f));
  q = fma(q, r, broadcast(1.666652040e-01f));
  q = fma(q, r, broadcast(4.999999343e-01f));
  return {fma(q, mul(r, r), r), n_int};
}

// What would be subnormal (x < -87.33655) is 0.
constexpr float kLowestExp = -87.33654f;

// e^x within 2 units in the last place. exp(0) is 1, exp(-inf) 0, exp(NaN) NaN, over 88.72
// infinity.
VL_SIMD FloatVec exp(FloatVec x) {
  const FloatVec lowest = broadcast(kLowestExp);
  const ReducedExp e = reduce_exp(min(broadcast(89.0f), max(lowest, x)));
  // 2^n may be more than the largest number.
  const IntLanes half = e.n >> 1;
  const FloatVec result =
      mul(mul(add(e.tail, broadcast(1.0f)), power_of_two(half)), power_of_two(e.n - half));
  return select(x.v < lowest.v, zero(), result);
}
// The same bits as exp(x), for x <= 0 or NaN.
VL_SIMD FloatVec exp_of_negative(FloatVec x) {
  const FloatVec lowest = broadcast(kLowestExp);
  const ReducedExp e = reduce_exp(max(lowest, x));
  return select(x.v < lowest.v, zero(), mul(add(e.tail, broadcast(1.0f)), power_of_two(e.n)));
}
VL_SIMD float exp(float x) { return exp(broadcast(x)).v[0]; }

// From e^(-2|x|) - 1, within 3 units in the last place also for small x.
VL_SIMD FloatVec tanh(FloatVec x) {
  const FloatVec y = max(broadcast(-80.0f), mul(abs(x), broadcast(-2.0f)));
  const ReducedExp e = reduce_exp(y);
  const FloatVec two_n = power_of_two(e.n);
  const FloatVec minus_one = fma(two_n, e.tail, sub(two_n, broadcast(1.0f)));
  const FloatVec magnitude = div(sub(zero(), minus_one), add(minus_one, broadcast(2.0f)));
  return from_bits(bits_of(magnitude) | (bits_of(x) & static_cast<int32_t>(0x80000000u)));
}

}  // namespace vllm_lite::VL_ISA
