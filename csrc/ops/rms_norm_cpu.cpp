#include "ops/ops.h"

namespace vllm_lite {

void rms_norm_cpu(const RmsNormParams& params) { VL_DISPATCH_ISA(rms_norm, params) }

}  // namespace vllm_lite
