#include "ops/ops.h"
#include "core/check.h"
namespace vllm_lite {
void rope_cpu(const RopeParams&) { throw Error("rope: not built"); }
}
