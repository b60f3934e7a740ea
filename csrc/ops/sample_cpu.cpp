#include "ops/ops.h"
#include "core/check.h"
namespace vllm_lite {
void sample_cpu(const SampleParams&) { throw Error("sample: not built"); }
}
