// What every binding of a tensor op begins with: checks that name the op and the argument, and the
// pointers behind the tensors.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "core/check.h"
#include "core/dtype.h"
#include "core/kv_layout_cpu.h"

namespace vllm_lite {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline void check(bool condition, const char* op, const char* what) {
  VL_CHECK(condition, std::string(op) + ": " + what);
}

inline DType float_dtype(const Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      throw Error(std::string(op) + ": dtype must be float32, bfloat16 or float16");
  }
}

// What a KV cache holds of heads whose queries, keys and values are `heads`. Its last dimension is
// theirs; an int8 cache has each row's scale behind it.
inline KvDType kv_cache_dtype(const Tensor& kv_cache, const Tensor& heads, const char* op) {
  check(kv_cache.dim() == 5 && kv_cache.size(1) == 2 && kv_cache.is_contiguous(), op,
        "kv_cache must be contiguous [num_blocks, 2, num_kv_heads, block_size, head_size]");
  const ScalarType type = kv_cache.scalar_type();
  const bool is_int8 = type == ScalarType::Char, is_float8 = type == ScalarType::Float8_e4m3fn;
  check(is_int8 || is_float8 || type == heads.scalar_type(), op,
        "kv_cache must have the dtype of query, key and value, or be float8_e4m3fn or int8");
  check(kv_cache.size(4) == heads.size(2) + (is_int8 ? kKvScaleBytes : 0), op,
        "kv_cache has another head_size (the last dimension of an int8 cache is head_size + 4)");
  return is_int8 ? KvDType::kInt8 : is_float8 ? KvDType::kFloat8E4M3 : KvDType::kAsQuery;
}

// Pointer to an int32/int64/float/uint8 tensor's data, which must be contiguous; nullptr for None.
template <typename T, ScalarType kType>
T* contiguous_data(const OptionalTensor& tensor, const char* op, const char* name) {
  if (!tensor.has_value()) return nullptr;
  check(tensor->scalar_type() == kType && tensor->is_contiguous(), op,
        (std::string(name) + " has the wrong dtype or is not contiguous").c_str());
  return static_cast<T*>(tensor->data_ptr());
}
inline int32_t* int32_data(const OptionalTensor& t, const char* op, const char* name) {
  return contiguous_data<int32_t, ScalarType::Int>(t, op, name);
}
inline int64_t* int64_data(const OptionalTensor& t, const char* op, const char* name) {
  return contiguous_data<int64_t, ScalarType::Long>(t, op, name);
}
inline float* float_data(const OptionalTensor& t, const char* op, const char* name) {
  return contiguous_data<float, ScalarType::Float>(t, op, name);
}
inline uint8_t* byte_data(const OptionalTensor& t, const char* op, const char* name) {
  return contiguous_data<uint8_t, ScalarType::Byte>(t, op, name);
}

// [tokens, heads, size] whose heads are back to back; the token stride is free.
inline void check_heads(const Tensor& t, const char* op, const char* name) {
  check(t.dim() == 3 && t.stride(2) == 1 && t.stride(1) == t.size(2), op,
        (std::string(name) + " must be [num_tokens, heads, head_size] with contiguous heads")
            .c_str());
}

// All of them on the device of the first.
template <typename... Others>
void check_same_device(const char* op, const Tensor& first, const Others&... others) {
  const auto same = [&](const OptionalTensor& t) {
    return !t ||
           (t->is_cuda() == first.is_cuda() && t->get_device_index() == first.get_device_index());
  };
  check((same(others) && ...), op, "all tensors must be on one device");
}

}  // namespace vllm_lite
