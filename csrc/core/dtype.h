// Element types of activations, weights and KV caches.
#pragma once

#include <cstdint>

namespace vllm_lite {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// What a KV cache holds: the dtype of queries, keys and values; on CUDA FP8 (E4M3, finite: 448 at
// most, no infinity) times k_scale and v_scale; on the CPU int8 with a scale for each token and
// head (core/kv_layout_cpu.h).
enum class KvDType : int32_t { kAsQuery, kFloat8E4M3, kInt8 };

}  // namespace vllm_lite
