#include "ops/ops.h"

namespace vllm_lite {

void silu_mul_cpu(const SiluMulParams& params) { VL_DISPATCH_ISA(silu_mul, params) }

}  // namespace vllm_lite
