// Where the CPU's kernels keep keys and values within a block of the cache.
//
// A block is [2 (K, V), num_kv_heads, block_size, head_size] elements on every back end. On the CPU
// the tokens of a block come in strips of 16, and a head's keys in a strip stand by words of 4
// bytes, which are two elements of 16 bits or one of 32:
//
//   keys:   [block_size / 16] [head_size / (elements of a word)] [16 tokens] words
//   values: [block_size] [head_size] elements
//
// So a vector of keys is one element of many tokens, which attention multiplies with one number of
// the query, and a strip is contiguous whatever the block size.
#pragma once

#include <cstdint>

namespace vllm_lite {

constexpr int32_t kStripTokens = 16;
constexpr int32_t kKeyWordBytes = 4;

constexpr bool has_cpu_kv_layout(int64_t block_size, int64_t head_size) {
  return block_size % kStripTokens == 0 && head_size % 2 == 0;
}

}  // namespace vllm_lite
