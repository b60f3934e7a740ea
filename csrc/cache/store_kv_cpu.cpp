#include <string>

#include "cache/store_kv.h"
#include "core/check.h"
#include "core/kv_layout_cpu.h"

namespace vllm_lite {

void store_kv_cpu(const StoreKvParams& params) {
  VL_CHECK(
      params.kv_dtype != KvDType::kFloat8E4M3,
      "store_kv: a float8 KV cache needs CUDA; on CPU it must have the model's dtype, or int8");
  VL_CHECK(has_cpu_kv_layout(params.block_size, params.head_size, params.kv_dtype),
           "store_kv: on CPU block_size must be a multiple of " + std::to_string(kStripTokens) +
               " and head_size of " + std::to_string(cpu_kv_head_multiple(params.kv_dtype)) +
               ", not " + std::to_string(params.block_size) + " and " +
               std::to_string(params.head_size));
  // Before the first store, so that a bad mapping changes nothing.
  const int64_t num_slots = params.num_blocks * params.block_size;
  for (int32_t token = 0; token < params.num_tokens; ++token) {
    const int64_t slot = params.slot_mapping[token];
    VL_CHECK(slot < num_slots, "store_kv: slot_mapping[" + std::to_string(token) + "] is " +
                                   std::to_string(slot) + "; the cache has slots 0 to " +
                                   std::to_string(num_slots - 1));
  }
  VL_DISPATCH_ISA(store_kv, params)
}

}  // namespace vllm_lite
