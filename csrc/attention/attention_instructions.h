// Which of the newer instructions the attention kernels may use on the current device.
#pragma once

#include <atomic>

#include "attention/params.h"

namespace vllm_lite {
namespace attention {

struct Instructions {
  bool bulk_copies;  // cp.async.bulk and mbarriers
  bool wgmma;        // which here sums as mma.sync does
};

// Found by a small kernel, once per device: whether the code was compiled for the device's
// architecture, and whether wgmma and mma.sync give the same bits for the same random tiles. Where
// they do not, a row's result would depend on whether it was prefilled or decoded, so wgmma is not
// used, and a line on stderr says so. The first call waits for the stream, which must not be
// captured then.
Instructions attention_instructions(const PagedAttentionParams& params);

// For tests and benchmarks: whether they are used where the device has them.
inline std::atomic<bool> hopper_allowed{true};

}  // namespace attention
}  // namespace vllm_lite
