// Element types of activations, weights and the KV cache.
#pragma once

#include <cstdint>

namespace vllm_lite {

// kFloat8E4M3 (finite: 448 at most, no infinity) is a dtype of KV caches alone.
enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat8E4M3 };

}  // namespace vllm_lite
