// One element at a time, for CPU code that is not worth vectors: conversions and the choice by
// dtype. Not for *_isa.cpp (core/simd.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace vllm_lite::element {

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(_Float16 x) { return static_cast<float>(x); }
inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, _Float16& out) { out = static_cast<_Float16>(x); }
inline void from_float(float x, BFloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  out.bits = static_cast<uint16_t>(std::isnan(x) ? bits >> 16 | 0x40u
                                                 : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Calls f(T{}) with the type of an activation dtype.
template <typename F>
void dispatch_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      return f(_Float16{});
  }
}

}  // namespace vllm_lite::element
