// RMS norm, bound by memory: each row is read once and kept in registers between the sum of squares
// and the result. All loads of a thread are on their way before the first sum.
//
// Which thread sums what, and in which order, follows from the size alone: a row's bits depend
// neither on the other rows nor on alignment.
#include "core/chunk.h"
#include "ops/ops.h"

namespace vllm_lite {
namespace {

using namespace device;

constexpr int kMaxThreads = 1024;
constexpr int kLongRowThreads = 512;
constexpr int kChunksPerThread = 2;
// Rows as short as a head share a block: as few lanes to each as can hold it, since what a thread
// does besides moving chunks is the same for one chunk and for two.
constexpr int kHeadThreads = 128;

// The sum over the threads of a row, the same bits in each: kLanes lanes of a warp or, where kLanes
// is 0, the block.
template <int kLanes>
__device__ __forceinline__ float sum_over_row(float sum) {
  constexpr int kHalf = (kLanes ? kLanes : 32) / 2;
#pragma unroll
  for (int offset = kHalf; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  if constexpr (kLanes == 0) {
    VL_SHARED(float, sums, [32]);
    const unsigned lane = threadIdx.x % 32;
    if (lane == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = lane < blockDim.x / 32 ? sums[lane] : 0.0f;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
  }
  return sum;
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(const Chunk<T>& x) {
  const auto values = to_floats(x);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) sum = fmaf(values.values[i], values.values[i], sum);
  return sum;
}

template <typename T>
__device__ __forceinline__ Chunk<T> add(const Chunk<T>& a, const Chunk<T>& b) {
  auto sum = to_floats(a);
  const auto more = to_floats(b);
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) sum.values[i] += more.values[i];
  return from_floats<T>(sum);
}

template <typename T>
__device__ __forceinline__ Chunk<T> scale(const Chunk<T>& x, const Chunk<T>& weight, float factor) {
  auto scaled = to_floats(x);
  const auto weights = to_floats(weight);
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    scaled.values[i] = scaled.values[i] * factor * weights.values[i];
  }
  return from_floats<T>(scaled);
}

// A row belongs to kLanes lanes or, where kLanes is 0, to a block. A thread holds kChunks chunks;
// kChunks 0: a row too long for registers, which is read a second time.
template <typename T, bool kAligned, int kLanes, int kChunks>
__global__ void __launch_bounds__(kLanes    ? kHeadThreads
                                  : kChunks ? kMaxThreads
                                            : kLongRowThreads)
    rms_norm_kernel(const __grid_constant__ RmsNormParams p) {
  constexpr int kSize = Chunk<T>::kSize;
  const uint32_t threads = kLanes ? kLanes : blockDim.x;  // of a row
  // This thread's first element, and from chunk to chunk.
  const int begin = static_cast<int>(threadIdx.x % threads) * kSize;
  const int step = static_cast<int>(threads) * kSize;

  // 32 bits: division is cheap. A row past the end takes part in the shuffles with no elements.
  const uint32_t row = kLanes ? (blockIdx.x * kHeadThreads + threadIdx.x) / threads : blockIdx.x;
  const uint32_t num_inner = static_cast<uint32_t>(p.num_inner);
  const uint32_t outer = row / num_inner, inner = row % num_inner;
  const int size = outer < p.num_outer ? p.size : 0;
  T* out = static_cast<T*>(p.out) + outer * p.out_outer_stride + inner * p.out_inner_stride;
  const T* input =
      static_cast<const T*>(p.input) + outer * p.input_outer_stride + inner * p.input_inner_stride;
  T* residual = static_cast<T*>(p.residual) + outer * p.residual_outer_stride +
                inner * p.residual_inner_stride;
  const T* weight = static_cast<const T*>(p.weight);
  const auto inverse_rms = [&](float sum) {
    const float mean = sum_over_row<kLanes>(sum) / static_cast<float>(p.size);
    return 1.0f / sqrtf(mean + p.epsilon);
  };

  float sum = 0.0f;
  if constexpr (kChunks > 0) {
    Chunk<T> x[kChunks], weights[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = begin + c * step;
      x[c] = load_chunk<kAligned>(input + i, size - i);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = begin + c * step;
      weights[c] = load_chunk<kAligned>(weight + i, size - i);
    }
    if (p.residual) {
      Chunk<T> old[kChunks];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int i = begin + c * step;
        old[c] = load_chunk<kAligned>(residual + i, size - i);
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int i = begin + c * step;
        x[c] = add(x[c], old[c]);
        store_chunk<kAligned>(residual + i, x[c], size - i);
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) sum += sum_of_squares(x[c]);
    const float factor = inverse_rms(sum);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = begin + c * step;
      store_chunk<kAligned>(out + i, scale(x[c], weights[c], factor), size - i);
    }
  } else {
#pragma unroll 2
    for (int i = begin; i < size; i += step) {
      Chunk<T> x = load_chunk<kAligned>(input + i, size - i);
      if (p.residual) {
        x = add(x, load_chunk<kAligned>(residual + i, size - i));
        store_chunk<kAligned>(residual + i, x, size - i);
      }
      sum += sum_of_squares(x);
    }
    const float factor = inverse_rms(sum);
    const T* source = p.residual ? residual : input;
#pragma unroll 2
    for (int i = begin; i < size; i += step) {
      const Chunk<T> x = load_chunk<kAligned>(source + i, size - i);
      const Chunk<T> weights = load_chunk<kAligned>(weight + i, size - i);
      store_chunk<kAligned>(out + i, scale(x, weights, factor), size - i);
    }
  }
}

template <typename T, bool kAligned>
void launch(const RmsNormParams& p) {
  const uint32_t rows = static_cast<uint32_t>(p.num_outer * p.num_inner);
  const int64_t chunks = num_chunks<T>(p.size);
  const auto launch_heads = [&](auto lanes) {
    constexpr uint32_t kRows = kHeadThreads / lanes.value;
    VL_LAUNCH((rms_norm_kernel<T, kAligned, lanes.value, kChunksPerThread>),
              (rows + kRows - 1) / kRows, kHeadThreads, 0, p.stream, p);
  };
  if (chunks <= 8 * kChunksPerThread) {
    launch_heads(std::integral_constant<int, 8>());
  } else if (chunks <= 16 * kChunksPerThread) {
    launch_heads(std::integral_constant<int, 16>());
  } else if (chunks <= kMaxThreads * kChunksPerThread) {
    constexpr int kPerWarp = 32 * kChunksPerThread;
    const uint32_t threads = static_cast<uint32_t>((chunks + kPerWarp - 1) / kPerWarp * 32);
    VL_LAUNCH((rms_norm_kernel<T, kAligned, 0, kChunksPerThread>), rows, threads, 0, p.stream, p);
  } else {
    VL_LAUNCH((rms_norm_kernel<T, kAligned, 0, 0>), rows, kLongRowThreads, 0, p.stream, p);
  }
}

}  // namespace

void rms_norm_cuda(const RmsNormParams& p) {
  if (p.size == 0 || p.num_outer == 0 || p.num_inner == 0) return;
  VL_CHECK(p.num_outer * p.num_inner <= INT32_MAX, "rms_norm: more than 2^31 - 1 rows");
  dispatch_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned =
        is_aligned<T>({p.out, p.input, p.residual, p.weight},
                      {p.size, p.out_outer_stride, p.out_inner_stride, p.input_outer_stride,
                       p.input_inner_stride, p.residual_outer_stride, p.residual_inner_stride});
    dispatch_bool(aligned, [&](auto is_true) { launch<T, is_true>(p); });
  });
}

}  // namespace vllm_lite
