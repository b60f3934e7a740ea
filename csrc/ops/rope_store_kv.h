// Rotary embedding and storing of the step's KV in one.
#pragma once

#include "cache/store_kv.h"
#include "ops/ops.h"

namespace vllm_lite {

// What rope and then store_kv of the rotated keys do, bit for bit, but for `key` itself, which may
// be left unrotated: on CUDA keys go straight into their slots. store.key is rope.key.
struct RopeStoreKvParams {
  RopeParams rope;
  StoreKvParams store;
};
void rope_store_kv_cpu(const RopeStoreKvParams& params);
void rope_store_kv_cuda(const RopeStoreKvParams& params);

}  // namespace vllm_lite
