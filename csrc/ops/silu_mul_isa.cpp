// silu(gate) * up: three elements of traffic and one exponential each.
#include "core/isa.h"
#include "core/parallel_for.h"
#include "ops/ops.h"
#include "ops/silu_isa.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int64_t kElementsPerTask = 8192;

template <typename T>
void run(const SiluMulParams& p) {
  parallel_for(p.num_tokens, kElementsPerTask / (p.size + 1) + 1, [&p](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      T* out = static_cast<T*>(p.out) + token * p.out_token_stride;
      const T* gate = static_cast<const T*>(p.gate_up) + token * p.gate_up_token_stride;
      const T* up = gate + p.size;
      int32_t i = 0;
      for (; i + kWidth <= p.size; i += kWidth) {
        store(out + i, silu_mul(load(gate + i), load(up + i)));
      }
      if (i == p.size) continue;
      const int rest = p.size - i;
      store_partial(out + i, silu_mul(load_partial(gate + i, rest), load_partial(up + i, rest)),
                    rest);
    }
  });
}

}  // namespace

void silu_mul(const SiluMulParams& params) {
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
