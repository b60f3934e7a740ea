// RMS norm, bound by memory: a row is read for the sum of squares and, from the cache, for the
// result.
#include "core/isa.h"
#include "core/parallel_for.h"
#include "core/simd.h"
#include "ops/ops.h"

namespace vllm_lite::VL_ISA {
namespace {

// Elements per task: enough work to be worth a thread.
constexpr int64_t kElementsPerTask = 16384;

// Adds residual into itself and returns the sum of squares of what is stored, or of x without one.
// Four accumulators hide the latency of the addition; their order depends on `size` alone.
template <typename T>
VL_SIMD float sum_of_squares(const T* x, T* residual, int32_t size) {
  FloatVec sums[4] = {zero(), zero(), zero(), zero()};
  const auto take = [&](int32_t i, FloatVec& sum) {
    FloatVec value = load(x + i);
    if (residual) {
      store(residual + i, add(value, load(residual + i)));
      value = load(residual + i);
    }
    sum = fma(value, value, sum);
  };
  int32_t i = 0;
  for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
    take(i, sums[0]);
    take(i + kWidth, sums[1]);
    take(i + 2 * kWidth, sums[2]);
    take(i + 3 * kWidth, sums[3]);
  }
  for (; i + kWidth <= size; i += kWidth) take(i, sums[0]);
  if (i < size) {
    FloatVec value = load_partial(x + i, size - i);
    if (residual) {
      store_partial(residual + i, add(value, load_partial(residual + i, size - i)), size - i);
      value = load_partial(residual + i, size - i);
    }
    sums[1] = fma(value, value, sums[1]);
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <typename T>
VL_SIMD void normalize_row(T* out, const T* x, const T* weight, int32_t size, float inverse_rms) {
  const FloatVec factor = broadcast(inverse_rms);
  int32_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
  }
  if (i == size) return;
  const int rest = size - i;
  const FloatVec value = mul(load_partial(x + i, rest), factor);
  store_partial(out + i, mul(value, load_partial(weight + i, rest)), rest);
}

template <typename T>
void run(const RmsNormParams& p) {
  const int64_t rows_per_task = kElementsPerTask / p.size + 1;
  parallel_for(p.num_outer * p.num_inner, rows_per_task, [&p](int64_t begin, int64_t end) {
    const T* weight = static_cast<const T*>(p.weight);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t outer = row / p.num_inner, inner = row % p.num_inner;
      const T* x = static_cast<const T*>(p.input) + outer * p.input_outer_stride +
                   inner * p.input_inner_stride;
      T* out = static_cast<T*>(p.out) + outer * p.out_outer_stride + inner * p.out_inner_stride;
      T* residual = nullptr;
      if (p.residual) {
        residual = static_cast<T*>(p.residual) + outer * p.residual_outer_stride +
                   inner * p.residual_inner_stride;
      }
      const float sum = sum_of_squares(x, residual, p.size);
      const float mean = sum / static_cast<float>(p.size);
      const float inverse_rms = 1.0f / __builtin_sqrtf(mean + p.epsilon);
      normalize_row(out, residual ? residual : x, weight, p.size, inverse_rms);
    }
  });
}

}  // namespace

void rms_norm(const RmsNormParams& params) {
  if (params.size == 0) return;
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
