// Moving KV data: new keys and values into their slots, blocks onto blocks.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/isa.h"

namespace vllm_lite {

struct StoreKvParams {
  const void* key;              // [num_tokens, num_kv_heads, head_size]
  const void* value;            // [num_tokens, num_kv_heads, head_size]
  void* kv_cache;               // [num_blocks, 2 (K, V), num_kv_heads, block_size, head_size];
                                // CPU: as in core/kv_layout_cpu.h
  const int64_t* slot_mapping;  // [num_tokens], block * block_size + offset; negative: not stored
  int64_t key_token_stride;     // elements
  int64_t value_token_stride;
  int64_t num_blocks;
  int32_t num_tokens;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t block_size;
  DType dtype;  // of key and value
  KvDType kv_dtype;
  // Of an FP8 cache: key / k_scale is stored, saturated.
  float k_scale, v_scale;
  int64_t stream;
};

VL_DECLARE_ISA_KERNEL(store_kv, StoreKvParams)
// Throws Error, and has stored nothing, if a slot lies beyond the cache's last block (on CUDA such
// a slot is not stored) or if block_size and head_size do not have the CPU's layout.
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

// In the order of the list: a pair may read what an earlier one wrote. Throws Error, and has copied
// nothing, if a pair names a block that the cache does not have. (On CUDA such a pair is left out.)
void copy_blocks_cpu(const CopyBlocksParams& params);
void copy_blocks_cuda(const CopyBlocksParams& params);

// Whole blocks from one arena to another, each of them on the device or in host memory (pinned, or
// the copies wait for each other and for the host).
struct SwapBlocksParams {
  const void* from_arena;      // [num_layers, from_num_blocks, block_bytes]
  void* to_arena;              // [num_layers, to_num_blocks, block_bytes]
  const int32_t* block_pairs;  // [num_pairs, 2] (source, destination), in host memory
  int64_t block_bytes;
  int64_t from_num_blocks;
  int64_t to_num_blocks;
  int32_t num_layers;
  int32_t num_pairs;
  int64_t stream;
};

// Throw Error, and have copied nothing, if a pair names a block that an arena does not have.
void swap_blocks_cpu(const SwapBlocksParams& params);
void swap_blocks_cuda(const SwapBlocksParams& params);
void check_swapped_blocks(const SwapBlocksParams& params);
// Calls copy(to, from, bytes) for each run of pairs whose sources and destinations are neighbours,
// in each layer.
template <typename Copy>
void for_each_swapped_run(const SwapBlocksParams& params, const Copy& copy) {
  check_swapped_blocks(params);
  for (int32_t begin = 0, end = 0; begin < params.num_pairs; begin = end) {
    const int32_t* first = params.block_pairs + 2 * begin;
    for (end = begin + 1; end < params.num_pairs; ++end) {
      if (first[2 * (end - begin)] != first[0] + end - begin) break;
      if (first[2 * (end - begin) + 1] != first[1] + end - begin) break;
    }
    for (int64_t layer = 0; layer < params.num_layers; ++layer) {
      copy(static_cast<char*>(params.to_arena) +
               (layer * params.to_num_blocks + first[1]) * params.block_bytes,
           static_cast<const char*>(params.from_arena) +
               (layer * params.from_num_blocks + first[0]) * params.block_bytes,
           (end - begin) * params.block_bytes);
    }
  }
}

}  // namespace vllm_lite
