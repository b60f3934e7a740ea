// Blocks between device memory and pinned host memory: copies in stream order, one per layer and
// run of neighbours.
#include "cache/store_kv.h"
#include "core/device.h"

namespace vllm_lite {

void swap_blocks_cuda(const SwapBlocksParams& p) {
  for_each_swapped_run(p, [&](void* to, const void* from, int64_t bytes) {
    device::copy_async(to, from, bytes, p.stream);
  });
}

}  // namespace vllm_lite
