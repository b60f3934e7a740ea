// Records of CPU attention (attention_work.h): cleared, merged, written out.
// Only for paged_attention_isa.cpp; what it says about VL_ISA holds here.
#pragma once

#include "attention/attention_work.h"
#include "core/simd.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

VL_SIMD float& maximum_of(float* record, int head_size) { return record[head_size]; }
VL_SIMD float& weight_of(float* record, int head_size) { return record[head_size + 1]; }

void clear(float* record, int head_size) {
  __builtin_memset(record, 0, sizeof(float) * head_size);
  maximum_of(record, head_size) = -kInfinity;
  weight_of(record, head_size) = 0;
}

// total = total * keep
VL_SIMD void scale_values(float* total, int head_size, float keep) {
  for (int d = 0; d < head_size; d += kWidth) {
    store(total + d, mul(load(total + d), broadcast(keep)));
  }
}

// The order of merges is the order of ranges. Exact where one of the two has seen nothing.
void merge(float* total, float* part, int head_size) {
  if (weight_of(part, head_size) == 0) return;
  if (weight_of(total, head_size) == 0) {
    __builtin_memcpy(total, part, sizeof(float) * record_floats(head_size));
    return;
  }
  const float old = maximum_of(total, head_size), other = maximum_of(part, head_size);
  const float maximum = old > other ? old : other;
  const float keep = exp(old - maximum), take = exp(other - maximum);
  scale_values(total, head_size, keep);
  for (int d = 0; d < head_size; d += kWidth) {
    store(total + d, fma(load(part + d), broadcast(take), load(total + d)));
  }
  maximum_of(total, head_size) = maximum;
  weight_of(total, head_size) =
      fma(weight_of(part, head_size), take, weight_of(total, head_size) * keep);
}

float* stored_record(const AttentionCall& call, const AttentionRow& row, int32_t range) {
  const int64_t index = row.record + int64_t{range - row.ranges.begin} * call.params->num_kv_heads +
                        call.item->kv_head;
  return call.records + index * record_floats(call.params->head_size);
}

int first_head(const AttentionCall& call) {
  return call.item->kv_head * (call.params->num_heads / call.params->num_kv_heads);
}

template <typename T>
void write_out(const AttentionCall& call, const AttentionRow& row, float* total) {
  const PagedAttentionParams& p = *call.params;
  T* out = static_cast<T*>(p.out) + row.token * p.out_token_stride +
           int64_t{first_head(call) + row.head} * p.head_size;
  const float weight = weight_of(total, p.head_size);
  const FloatVec factor = broadcast(weight == 0 ? 0.0f : 1.0f / weight);
  for (int d = 0; d < p.head_size; d += kWidth) store(out + d, mul(load(total + d), factor));
}

}  // namespace
}  // namespace vllm_lite::VL_ISA
