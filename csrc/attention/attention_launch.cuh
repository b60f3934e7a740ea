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

// The kernels for Hopper are worth their compile time where most models are.
template <typename T, typename Kv, int kHeadSize>
constexpr bool kHasHopper = std::is_same_v<T, Kv> && (kHeadSize == 64 || kHeadSize == 128);

template <typename T, typename Kv, int kHeadSize, bool kPlain>
void launch_variant(const KernelArgs& args) {
  const PagedAttentionParams& params = args.params;
  const bool has_prefill = has_prefill_items(params.num_tokens, params.num_seqs);
  Instructions allowed{};
  if constexpr (kHasHopper<T, Kv, kHeadSize>) {
    allowed = attention_instructions(params);
    if (has_prefill && allowed.wgmma) launch_hopper_prefill<T, kHeadSize, kPlain>(args);
    if (allowed.bulk_copies) launch_decode<T, Kv, kHeadSize, kPlain, true>(args);
  }
  if (has_prefill && !allowed.wgmma) launch_prefill<T, Kv, kHeadSize, kPlain>(args);
  if (!allowed.bulk_copies) launch_decode<T, Kv, kHeadSize, kPlain, false>(args);
}

// Sliding window, soft cap and ALiBi are off by template where a call has none of them.
template <typename T, typename Kv, int kHeadSize>
void launch_items(const KernelArgs& args) {
  if (args.window == kNoWindow && !args.factors.bends) {
    launch_variant<T, Kv, kHeadSize, true>(args);
  } else {
    launch_variant<T, Kv, kHeadSize, false>(args);
  }
}

}  // namespace attention
}  // namespace vllm_lite
