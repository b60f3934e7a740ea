// Moving KV data: new keys and values into their slots, blocks onto blocks.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/isa.h"

namespace vllm_lite {

struct StoreKvParams {
  const void* key;              // [num_tokens, num_kv_heads, head_size]
  const void* value;            // [num_tokens, num_kv_heads, head_size]
  void* kv_cache;               // [num_blocks, 2 (K, V), num_kv_heads, block_size, head_size]
  const int64_t* slot_mapping;  // [num_tokens], block * block_size + offset; negative: not stored
  int64_t key_token_stride;     // elements
  int64_t value_token_stride;
  int64_t num_blocks;
  int32_t num_tokens;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t block_size;
  DType dtype;
  int64_t stream;
};

VL_DECLARE_ISA_KERNEL(store_kv, StoreKvParams)
// Throws Error, and has stored nothing, if a slot lies beyond the cache's last block.
void store_kv_cpu(const StoreKvParams& params);
void store_kv_cuda(const StoreKvParams& params);

struct CopyBlocksParams {
  void* kv_cache;              // [num_layers, num_blocks, block_bytes]
  const int32_t* block_pairs;  // [num_pairs, 2] (source, destination), destinations distinct
  int64_t block_bytes;         // K and V of all heads of one block in one layer
  int64_t num_blocks;
  int32_t num_layers;
  int32_t num_pairs;
  int64_t stream;
};

// Throws Error, and has copied nothing, if a pair names a block that the cache does not have.
void copy_blocks_cpu(const CopyBlocksParams& params);
void copy_blocks_cuda(const CopyBlocksParams& params);

}  // namespace vllm_lite
