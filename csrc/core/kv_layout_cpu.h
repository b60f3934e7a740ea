// Where the CPU's kernels keep keys and values within a block of the cache.
//
// A block is [2 (K, V), num_kv_heads, block_size] rows on every back end. On the CPU the tokens of
// a block come in strips of 16, and a head's keys in a strip stand by words of 4 bytes, which are
// one element of 32 bits, two of 16 or four of 8:
//
//   keys:   [block_size / 16] strips of [head_size / (elements of a word)] [16 tokens] words
//   values: [block_size / 16] strips of [16 tokens] [head_size] elements or, where these have 16
//           bits, of [8 pairs of tokens] [head_size] words, the first token's in the lower half
//
// So a vector of keys is one element of many tokens, which attention multiplies with one number of
// the query, a vector of values is elements of one token or of two, and a strip is contiguous
// whatever the block size.
//
// A row of an int8 cache is head_size elements and 4 bytes for its scale: a token's key (or value)
// of one head is integer * scale. A strip of either ends with its tokens' scales:
//
//   keys:   ... [head_size / 4] [16 tokens] words, [16 tokens] float32
//   values: ... [16 tokens] [head_size] int8, [16 tokens] float32
//
// The scales travel with the block, and are what the token alone makes them: its largest magnitude,
// or 2^-100 if that is more, over 127. A vector with a number that is not finite has the scale NaN.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace vllm_lite {

constexpr int32_t kStripTokens = 16;
constexpr int32_t kKeyWordBytes = 4;
constexpr int32_t kKvScaleBytes = 4;
constexpr float kMostInt8 = 127;

// What head_size must be a multiple of.
constexpr int32_t cpu_kv_head_multiple(KvDType kv_dtype) {
  return kv_dtype == KvDType::kInt8 ? 16 : 2;
}
constexpr bool has_cpu_kv_layout(int64_t block_size, int64_t head_size, KvDType kv_dtype) {
  return block_size % kStripTokens == 0 && head_size % cpu_kv_head_multiple(kv_dtype) == 0;
}

}  // namespace vllm_lite
