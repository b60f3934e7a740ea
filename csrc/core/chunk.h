// Kernels bound by memory move 16 bytes per instruction: a chunk. Where an address or a size is not
// a multiple of 16 the same chunks are moved element by element, so that a result does not depend
// on alignment. For *.cu alone.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "core/device.h"

namespace vllm_lite::device {

template <typename T, int kCount = 16 / static_cast<int>(sizeof(T))>
struct alignas(sizeof(T) * kCount) Chunk {
  static constexpr int kSize = kCount;
  T values[kCount];
};

// The first `count` elements from `from`, zeros after them. kAligned: `from` is aligned to a chunk
// and count >= kSize, or count <= 0 and nothing is read.
template <bool kAligned, typename T, int kCount = Chunk<T>::kSize>
__device__ __forceinline__ Chunk<T, kCount> load_chunk(const T* from, int count) {
  Chunk<T, kCount> chunk{};
  if constexpr (kAligned) {
    if (count > 0) chunk = *reinterpret_cast<const Chunk<T, kCount>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) chunk.values[i] = from[i];
    }
  }
  return chunk;
}

// As load_chunk: the elements that `count` leaves out are not written.
template <bool kAligned, typename T, int kCount>
__device__ __forceinline__ void store_chunk(T* to, const Chunk<T, kCount>& chunk, int count) {
  if constexpr (kAligned) {
    if (count > 0) *reinterpret_cast<Chunk<T, kCount>*>(to) = chunk;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) to[i] = chunk.values[i];
    }
  }
}

// ---- host side

template <typename T>
int64_t num_chunks(int64_t elements) {
  return (elements + Chunk<T>::kSize - 1) / Chunk<T>::kSize;
}

// Whether chunks of T can be moved whole: pointers at multiples of 16 bytes; strides and sizes
// (elements) that are multiples of a chunk.
template <typename T>
bool is_aligned(std::initializer_list<const void*> pointers,
                std::initializer_list<int64_t> elements) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  }
  for (const int64_t count : elements) {
    if (count % Chunk<T>::kSize != 0) return false;
  }
  return true;
}

// Calls f(T{}) with the storage type of an activation dtype.
template <typename F>
void dispatch_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      return f(Float16{});
    case DType::kFloat8E4M3:
      break;
  }
  VL_ASSERT(dtype != DType::kFloat8E4M3);
}

// Calls f(std::true_type) or f(std::false_type).
template <typename F>
void dispatch_bool(bool value, const F& f) {
  value ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace vllm_lite::device
