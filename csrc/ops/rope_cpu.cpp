#include <string>

#include "core/check.h"
#include "ops/ops.h"
#include "ops/rope_store_kv.h"

namespace vllm_lite {

void rope_cpu(const RopeParams& params) {
  for (int32_t i = 0; i < params.num_tokens; ++i) {
    const int32_t position = params.positions[i];
    VL_CHECK(position >= 0 && position < params.max_position,
             "rope: positions[" + std::to_string(i) + "] is " + std::to_string(position) +
                 ", but cos_sin holds positions 0 to " + std::to_string(params.max_position - 1));
  }
  VL_DISPATCH_ISA(rope, params)
}

void rope_store_kv_cpu(const RopeStoreKvParams& params) {
  rope_cpu(params.rope);
  store_kv_cpu(params.store);
}

}  // namespace vllm_lite
