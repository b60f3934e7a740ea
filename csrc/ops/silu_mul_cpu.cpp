#include "ops/ops.h"
#include "core/check.h"
namespace vllm_lite {
void silu_mul_cpu(const SiluMulParams&) { throw Error("silu_mul: not built"); }
}
