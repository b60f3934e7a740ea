// Rows of the embedding table, each a copy or a conversion.
#include <cstddef>

#include "core/isa.h"
#include "core/parallel_for.h"
#include "core/simd.h"
#include "ops/ops.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int64_t kElementsPerTask = 16384;

template <typename Out>
VL_SIMD void convert(Out* out, const Out* row, int32_t size) {
  __builtin_memcpy(out, row, static_cast<size_t>(size) * sizeof(Out));
}
template <typename Out, typename In>
VL_SIMD void convert(Out* out, const In* row, int32_t size) {
  int32_t i = 0;
  for (; i + kWidth <= size; i += kWidth) store(out + i, load(row + i));
  if (i < size) store_partial(out + i, load_partial(row + i, size - i), size - i);
}

template <typename Out, typename In>
void run(const EmbeddingParams& p) {
  parallel_for(p.num_tokens, kElementsPerTask / (p.size + 1) + 1, [&p](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = p.token_ids[i] >= 0 ? p.token_ids[i] : p.last_tokens[~p.token_ids[i]];
      convert(static_cast<Out*>(p.out) + i * p.out_token_stride,
              static_cast<const In*>(p.table) + token * p.size, p.size);
    }
  });
}

template <typename Out>
void run_out(const EmbeddingParams& params) {
  switch (params.table_dtype) {
    case DType::kFloat32:
      return run<Out, float>(params);
    case DType::kBFloat16:
      return run<Out, BFloat16>(params);
    case DType::kFloat16:
      return run<Out, Float16>(params);
  }
}

}  // namespace

void embedding(const EmbeddingParams& params) {
  switch (params.out_dtype) {
    case DType::kFloat32:
      return run_out<float>(params);
    case DType::kBFloat16:
      return run_out<BFloat16>(params);
    case DType::kFloat16:
      return run_out<Float16>(params);
  }
}

}  // namespace vllm_lite::VL_ISA
