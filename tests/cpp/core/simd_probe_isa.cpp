#include "core/simd.h"
#include "simd_probe.h"

namespace vllm_lite::VL_ISA {
namespace {

// The storage types as the table has them: their bits.
uint16_t bits_of_storage(BFloat16 x) { return x.bits; }
uint16_t bits_of_storage(Float16 x) { return x.bits; }
float bits_of_storage(float x) { return x; }
void set_bits(BFloat16& x, uint16_t bits) { x.bits = bits; }
void set_bits(Float16& x, uint16_t bits) { x.bits = bits; }
void set_bits(float& x, float bits) { x = bits; }

template <typename T, typename Storage>
constexpr StorageProbe<Storage> storage_probe() {
  return {
      [](const Storage* in, float* out) { store(out, load(reinterpret_cast<const T*>(in))); },
      [](const float* in, Storage* out) { store(reinterpret_cast<T*>(out), load(in)); },
      [](const Storage* in, int count, float* out) {
        store(out, load_partial(reinterpret_cast<const T*>(in), count));
      },
      [](const float* in, int count, Storage* out) {
        store_partial(reinterpret_cast<T*>(out), load(in), count);
      },
      [](Storage in) {
        T x;
        set_bits(x, in);
        return to_float(x);
      },
      [](float in) {
        T x;
        from_float(in, x);
        return bits_of_storage(x);
      },
  };
}

template <typename T>
void widen_pairs(const uint16_t* in, float* lower, float* upper) {
  IntLanes pairs;
  __builtin_memcpy(&pairs, in, sizeof(pairs));
  store(lower, widen_lower(pairs, T{}));
  store(upper, widen_upper(pairs, T{}));
}

}  // namespace

extern const SimdProbe kSimdProbe = {
    kWidth,
    storage_probe<float, float>(),
    storage_probe<BFloat16, uint16_t>(),
    storage_probe<Float16, uint16_t>(),
    widen_pairs<BFloat16>,
    widen_pairs<Float16>,
    [](const float* in, float* out) { store(out, exp(load(in))); },
    [](const float* in, float* out) { store(out, tanh(load(in))); },
    [](float in) { return exp(in); },
    [](const float* a, const float* b, const float* c, float* out) {
      store(out, fma(load(a), load(b), load(c)));
    },
    [](float a, float b, float c) { return fma(a, b, c); },
    [](const float* a, const float* b, float* out) { store(out, max(load(a), load(b))); },
    [](const float* a, const float* b, float* out) { store(out, min(load(a), load(b))); },
    [](const float* in, float* out) { store(out, sqrt(load(in))); },
    [](const float* in) { return reduce_add(load(in)); },
    [](const float* in) { return reduce_max(load(in)); },
};

}  // namespace vllm_lite::VL_ISA
