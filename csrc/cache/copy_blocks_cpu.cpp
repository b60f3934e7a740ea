#include <cstring>
#include <string>

#include "cache/store_kv.h"
#include "core/check.h"
#include "core/parallel_for.h"

namespace vllm_lite {

void copy_blocks_cpu(const CopyBlocksParams& params) {
  // Before the first copy, so that a bad list changes nothing.
  for (int32_t i = 0; i < 2 * params.num_pairs; ++i) {
    const int32_t block = params.block_pairs[i];
    VL_CHECK(block >= 0 && block < params.num_blocks,
             "copy_blocks: block_pairs names block " + std::to_string(block) +
                 "; the cache has blocks 0 to " + std::to_string(params.num_blocks - 1));
  }
  // Within a layer in the order of the list: a pair may read what an earlier one wrote.
  parallel_for(params.num_layers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t layer = begin; layer < end; ++layer) {
      char* blocks =
          static_cast<char*>(params.kv_cache) + layer * params.num_blocks * params.block_bytes;
      for (int32_t pair = 0; pair < params.num_pairs; ++pair) {
        const int64_t source = params.block_pairs[2 * pair];
        const int64_t destination = params.block_pairs[2 * pair + 1];
        if (source == destination) continue;
        std::memcpy(blocks + destination * params.block_bytes, blocks + source * params.block_bytes,
                    static_cast<size_t>(params.block_bytes));
      }
    }
  });
}

}  // namespace vllm_lite
