// csrc/core/simd.h as ordinary functions, one table per instruction set, for simd_test.cpp.
#pragma once

#include <cstdint>

namespace vllm_lite {

// Of one storage type: float, or the bits of a bf16 or fp16 number. The vector forms take one
// vector, width elements.
template <typename Storage>
struct StorageProbe {
  void (*load)(const Storage* in, float* out);
  void (*store)(const float* in, Storage* out);
  void (*load_partial)(const Storage* in, int count, float* out);
  void (*store_partial)(const float* in, int count, Storage* out);
  float (*to_float)(Storage in);
  Storage (*from_float)(float in);
};

struct SimdProbe {
  int width;
  StorageProbe<float> float32;
  StorageProbe<uint16_t> bfloat16;
  StorageProbe<uint16_t> float16;
  void (*widen_bfloat16)(const uint16_t* in, float* lower, float* upper);  // in: 2 * width
  void (*widen_float16)(const uint16_t* in, float* lower, float* upper);
  void (*exp)(const float* in, float* out);
  void (*tanh)(const float* in, float* out);
  float (*exp_one)(float in);
  void (*fma)(const float* a, const float* b, const float* c, float* out);
  float (*fma_one)(float a, float b, float c);
  void (*max)(const float* a, const float* b, float* out);
  void (*min)(const float* a, const float* b, float* out);
  void (*sqrt)(const float* in, float* out);
  float (*reduce_add)(const float* in);
  float (*reduce_max)(const float* in);
};

namespace portable {
extern const SimdProbe kSimdProbe;
}
namespace avx2 {
extern const SimdProbe kSimdProbe;
}
namespace avx512 {
extern const SimdProbe kSimdProbe;
}

}  // namespace vllm_lite
