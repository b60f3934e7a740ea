// The gated activation. Only for files named *_isa.cpp; what simd.h says holds here.
#pragma once

#include "core/simd.h"

namespace vllm_lite::VL_ISA {

VL_SIMD FloatVec silu_mul(FloatVec gate, FloatVec up) {
  const FloatVec denominator = add(broadcast(1.0f), exp(sub(zero(), gate)));
  return mul(div(gate, denominator), up);
}

// Of what is rounded to T first.
template <typename T>
VL_SIMD FloatVec silu_mul_as(FloatVec gate, FloatVec up) {
  T gates[kWidth], ups[kWidth];
  store(gates, gate);
  store(ups, up);
  return silu_mul(load(gates), load(ups));
}

}  // namespace vllm_lite::VL_ISA
