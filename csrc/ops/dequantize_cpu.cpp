#include "ops/ops.h"
#include "core/check.h"
namespace vllm_lite {
int64_t dequantize_block_bytes(GgmlType, int64_t) { return 0; }
void dequantize_cpu(const DequantizeParams&) { throw Error("dequantize: not built"); }
}
