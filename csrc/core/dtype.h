// Element types of activations, weights and the KV cache.
#pragma once

#include <cstdint>

namespace vllm_lite {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

}  // namespace vllm_lite
