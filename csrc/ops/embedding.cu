// Rows of the embedding table, one block each: 16 bytes of the table per thread and step.
#include <cstdint>
#include <type_traits>

#include "core/chunk.h"
#include "core/device.h"
#include "ops/ops.h"

namespace vllm_lite {
namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // elements of a thread's step

template <typename T>
struct alignas(16) Vector {
  T v[kVector];
};

template <typename Out, typename In>
__device__ Out convert(In x) {
  if constexpr (std::is_same_v<Out, In>) {
    return x;
  } else {
    return device::from_float<Out>(device::to_float(x));
  }
}

// Zeros for an id that leads out of the table or of last_tokens.
template <typename Out, typename In>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const __grid_constant__ EmbeddingParams p) {
  const int i = static_cast<int>(blockIdx.x);
  int32_t token = p.token_ids[i];
  if (token < 0) {
    const int32_t row = ~token;
    token = p.last_tokens != nullptr && row < p.max_rows ? p.last_tokens[row] : -1;
  }
  const bool inside = token >= 0 && token < p.vocab_size;
  Out* out = static_cast<Out*>(p.out) + i * p.out_token_stride;
  const In* row =
      static_cast<const In*>(p.table) + static_cast<int64_t>(inside ? token : 0) * p.size;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(row)) % 16 == 0;
  const int num_vectors = aligned ? p.size / kVector : 0;
  for (int j = static_cast<int>(threadIdx.x); j < num_vectors; j += kThreads) {
    Vector<Out> result = {};
    if (inside) {
      const Vector<In> x = reinterpret_cast<const Vector<In>*>(row)[j];
#pragma unroll
      for (int k = 0; k < kVector; ++k) result.v[k] = convert<Out>(x.v[k]);
    }
    reinterpret_cast<Vector<Out>*>(out)[j] = result;
  }
  for (int j = num_vectors * kVector + static_cast<int>(threadIdx.x); j < p.size; j += kThreads) {
    out[j] = inside ? convert<Out>(row[j]) : Out{};
  }
}

template <typename Out, typename In>
void launch(const EmbeddingParams& params) {
  VL_LAUNCH((embedding_kernel<Out, In>), static_cast<unsigned>(params.num_tokens), kThreads, 0,
            params.stream, params);
}

}  // namespace

void embedding_cuda(const EmbeddingParams& params) {
  if (params.num_tokens == 0) return;
  device::dispatch_dtype(params.out_dtype, [&](auto out) {
    device::dispatch_dtype(params.table_dtype,
                           [&](auto table) { launch<decltype(out), decltype(table)>(params); });
  });
}

}  // namespace vllm_lite
