#include "cache/store_kv.h"

namespace vllm_lite {

void store_kv_cpu(const StoreKvParams& params) { VL_DISPATCH_ISA(store_kv, params) }

}  // namespace vllm_lite
