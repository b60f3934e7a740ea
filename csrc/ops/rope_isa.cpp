// Rotary embedding, bound by memory: each head is read and written once.
#include "core/isa.h"
#include "core/parallel_for.h"
#include "core/simd.h"
#include "ops/ops.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int64_t kElementsPerTask = 16384;

// Rotates the pairs (x[i], x[i + half]), i < half.
template <typename T>
VL_SIMD void rotate_head(T* x, const float* cosines, const float* sines, int32_t half) {
  int32_t i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const FloatVec a = load(x + i), b = load(x + half + i);
    const FloatVec c = load(cosines + i), s = load(sines + i);
    store(x + i, sub(mul(a, c), mul(b, s)));
    store(x + half + i, add(mul(b, c), mul(a, s)));
  }
  if (i == half) return;
  const int rest = half - i;
  const FloatVec a = load_partial(x + i, rest), b = load_partial(x + half + i, rest);
  const FloatVec c = load_partial(cosines + i, rest), s = load_partial(sines + i, rest);
  store_partial(x + i, sub(mul(a, c), mul(b, s)), rest);
  store_partial(x + half + i, add(mul(b, c), mul(a, s)), rest);
}

template <typename T>
void run(const RopeParams& p) {
  const int64_t elements = int64_t{p.num_heads + p.num_kv_heads} * p.rotary_size;
  parallel_for(
      p.num_tokens, kElementsPerTask / (elements + 1) + 1, [&p](int64_t begin, int64_t end) {
        const int32_t half = p.rotary_size / 2;
        for (int64_t token = begin; token < end; ++token) {
          const float* cosines = p.cos_sin + p.positions[token] * int64_t{p.rotary_size};
          T* query = static_cast<T*>(p.query) + token * p.query_token_stride;
          T* key = static_cast<T*>(p.key) + token * p.key_token_stride;
          for (int32_t head = 0; head < p.num_heads; ++head) {
            rotate_head(query + int64_t{head} * p.head_size, cosines, cosines + half, half);
          }
          for (int32_t head = 0; head < p.num_kv_heads; ++head) {
            rotate_head(key + int64_t{head} * p.head_size, cosines, cosines + half, half);
          }
        }
      });
}

}  // namespace

void rope(const RopeParams& params) {
  switch (params.dtype) {
    case DType::kFloat32:
      return run<float>(params);
    case DType::kBFloat16:
      return run<BFloat16>(params);
    case DType::kFloat16:
      return run<Float16>(params);
  }
}

}  // namespace vllm_lite::VL_ISA
