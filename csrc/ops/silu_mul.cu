// silu(gate) * up: three elements of traffic and one exponential each. The chunks of all tokens are
// numbered through and dealt out evenly, whatever the row's length.
#include "core/chunk.h"
#include "ops/ops.h"

namespace vllm_lite {
namespace {

using namespace device;

constexpr int kThreads = 128;
// Per thread. With gate and up, 64 bytes per thread are on their way.
constexpr int kChunks = 2;

template <typename T>
__device__ __forceinline__ float silu(float x) {
  if constexpr (sizeof(T) == 4) {
    return x / (1.0f + expf(-x));
  } else {
    constexpr float kLog2E = 1.44269504f;
    // Beyond 2^126 the divisor gives 0, which no rounding tells from the true 1e-36.
    return __fdividef(x, 1.0f + exp2_approx(-kLog2E * x));
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    silu_mul_kernel(const __grid_constant__ SiluMulParams p, uint32_t chunks_per_token,
                    uint32_t total_chunks) {
  constexpr int kSize = Chunk<T>::kSize;
  Chunk<T> gate[kChunks], up[kChunks];
  T* out[kChunks];
  int count[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const uint32_t chunk = (blockIdx.x * kChunks + c) * kThreads + threadIdx.x;
    const uint32_t token = chunk / chunks_per_token;
    const int i = static_cast<int>(chunk % chunks_per_token) * kSize;
    count[c] = chunk < total_chunks ? p.size - i : 0;
    out[c] = static_cast<T*>(p.out) + token * p.out_token_stride + i;
    const T* from = static_cast<const T*>(p.gate_up) + token * p.gate_up_token_stride + i;
    gate[c] = load_chunk<kAligned>(from, count[c]);
    up[c] = load_chunk<kAligned>(from + p.size, count[c]);
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const auto x = to_floats(gate[c]), factor = to_floats(up[c]);
    Chunk<float, kSize> result;
#pragma unroll
    for (int i = 0; i < kSize; ++i) result.values[i] = silu<T>(x.values[i]) * factor.values[i];
    store_chunk<kAligned>(out[c], from_floats<T>(result), count[c]);
  }
}

}  // namespace

void silu_mul_cuda(const SiluMulParams& p) {
  if (p.num_tokens == 0 || p.size == 0) return;
  dispatch_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t per_token = num_chunks<T>(p.size), total = p.num_tokens * per_token;
    VL_CHECK(total <= INT32_MAX, "silu_mul: more than 2^31 - 1 chunks of 16 bytes");
    const bool aligned =
        is_aligned<T>({p.out, p.gate_up}, {p.size, p.out_token_stride, p.gate_up_token_stride});
    dispatch_bool(aligned, [&](auto is_true) {
      constexpr int kTile = kThreads * kChunks;
      VL_LAUNCH((silu_mul_kernel<T, is_true>), static_cast<uint32_t>((total + kTile - 1) / kTile),
                kThreads, 0, p.stream, p, static_cast<uint32_t>(per_token),
                static_cast<uint32_t>(total));
    });
  });
}

}  // namespace vllm_lite
