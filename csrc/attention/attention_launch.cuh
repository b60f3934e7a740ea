// Which kernels the decode and the prefill items of one head size and kind of cache get.
//
// All are persistent: as many blocks as run at once, which read how many items there are from the
// plan in device memory, so that a captured graph serves steps of different make-up.
#pragma once

#include <type_traits>

#include "attention/attention_decode.cuh"
#include "attention/attention_hopper.cuh"
#include "attention/attention_instructions.h"
#include "attention/attention_prefill.cuh"

namespace vllm_lite {
namespace attention {

// Kernels without soft cap and ALiBi, and those for Hopper, are worth their compile time where most
// models are.
template <typename T, typename Kv, int kHeadSize>
constexpr bool kHasHopper = std::is_same_v<T, Kv> && (kHeadSize == 64 || kHeadSize == 128);
template <typename T, typename Kv, int kHeadSize>
constexpr bool kHasPlain =
    kHasHopper<T, Kv, kHeadSize> || (std::is_same_v<T, Kv> && kHeadSize == 256);

template <typename T, typename Kv, int kHeadSize>
void launch_items(const KernelArgs& args) {
  const PagedAttentionParams& params = args.params;
  const bool has_prefill = has_prefill_items(params.num_tokens, params.num_seqs);
  if constexpr (kHasPlain<T, Kv, kHeadSize>) {
    if (params.soft_cap == 0 && params.alibi_slopes == nullptr && args.factors.scale > 0) {
      Instructions allowed{};
      if constexpr (kHasHopper<T, Kv, kHeadSize>) {
        allowed = attention_instructions(params);
        if (has_prefill && allowed.wgmma) launch_hopper_prefill<T, kHeadSize>(args);
        if (allowed.bulk_copies) launch_decode<T, Kv, kHeadSize, true, true>(args);
      }
      if (has_prefill && !allowed.wgmma) launch_prefill<T, Kv, kHeadSize, true>(args);
      if (!allowed.bulk_copies) launch_decode<T, Kv, kHeadSize, true, false>(args);
      return;
    }
  }
  if (has_prefill) launch_prefill<T, Kv, kHeadSize, false>(args);
  launch_decode<T, Kv, kHeadSize, false, false>(args);
}

}  // namespace attention
}  // namespace vllm_lite
