#include <cstring>
#include <string>

#include "cache/store_kv.h"
#include "core/check.h"

namespace vllm_lite {

void check_swapped_blocks(const SwapBlocksParams& params) {
  const auto check = [](int32_t block, int64_t num_blocks, const char* arena) {
    VL_CHECK(block >= 0 && block < num_blocks,
             "swap_blocks: block_pairs names block " + std::to_string(block) + " of " + arena +
                 ", which has blocks 0 to " + std::to_string(num_blocks - 1));
  };
  for (int32_t pair = 0; pair < params.num_pairs; ++pair) {
    check(params.block_pairs[2 * pair], params.from_num_blocks, "from_arena");
    check(params.block_pairs[2 * pair + 1], params.to_num_blocks, "to_arena");
  }
}

void swap_blocks_cpu(const SwapBlocksParams& params) {
  for_each_swapped_run(params, [](void* to, const void* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  });
}

}  // namespace vllm_lite
