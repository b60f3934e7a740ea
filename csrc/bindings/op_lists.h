// Ops whose calls may go into a list instead of being made.
#pragma once

#include "attention/params.h"
#include "ops/linear.h"
#include "ops/moe.h"
#include "ops/op_list.h"
#include "ops/ops.h"
#include "ops/rope_store_kv.h"

namespace vllm_lite {

inline void set_size(RmsNormParams& p, const StepSize& size) { p.num_outer = size.num_tokens; }
inline void set_size(SiluMulParams& p, const StepSize& size) {
  p.num_tokens = static_cast<int32_t>(size.num_tokens);
}
inline void set_size(EmbeddingParams& p, const StepSize& size) {
  p.num_tokens = static_cast<int32_t>(size.num_tokens);
}
inline void set_size(RopeStoreKvParams& p, const StepSize& size) {
  p.rope.num_tokens = p.store.num_tokens = static_cast<int32_t>(size.num_tokens);
}
inline void set_size(PagedAttentionParams& p, const StepSize& size) {
  p.num_tokens = size.num_tokens;
  p.num_seqs = size.num_seqs;
}

inline void set_size(LinearParams& p, const StepSize& size) { p.num_tokens = size.num_tokens; }
inline void set_size(PackedEmbeddingParams& p, const StepSize& size) {
  p.num_tokens = static_cast<int32_t>(size.num_tokens);
}
inline void set_size(GatherRowsParams& p, const StepSize& size) {
  p.num_rows = static_cast<int32_t>(size.num_tokens);
}

// Where this thread's calls go; nullptr: they are made.
OpList*& recording_list();

template <auto kKernel, typename Params>
void call(const Params& params) {
#if !defined(VL_CUDA_ON_HOST)
  if (OpList* list = recording_list()) return list->add<Params>(kKernel, params);
#endif
  kKernel(params);
}

}  // namespace vllm_lite
