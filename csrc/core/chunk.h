// Kernels bound by memory move 16 bytes per instruction: a chunk. Where an address or a size is not
// a multiple of 16 the same chunks are moved element by element, so that a result does not depend
// on alignment. For *.cu alone.
#pragma once

#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "core/device.h"

namespace vllm_lite::device {

template <typename T, int kCount = 16 / static_cast<int>(sizeof(T))>
struct alignas(sizeof(T) * kCount) Chunk {
  static constexpr int kSize = kCount;
  T values[kCount];
};

// What a chunk is moved as. Elements of 8 or 16 bits that a condition fills would be
// kept apart, each in a register of its own, and stored in parts.
template <int kBytes>
struct alignas(kBytes) [[gnu::may_alias]] Words {
  uint32_t words[kBytes / 4];
};

// The first `count` elements from `from`, zeros after them. kAligned: `from` is aligned to a chunk
// and count >= kSize, or count <= 0 and nothing is read.
template <bool kAligned, typename T, int kCount = Chunk<T>::kSize>
__device__ __forceinline__ Chunk<T, kCount> load_chunk(const T* from, int count) {
  Chunk<T, kCount> chunk{};
  if constexpr (kAligned) {
    Words<sizeof(chunk)> words{};
    if (count > 0) words = *reinterpret_cast<const Words<sizeof(chunk)>*>(from);
    memcpy(&chunk, &words, sizeof(chunk));
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
    Words<sizeof(chunk)> words;
    memcpy(&words, &chunk, sizeof(chunk));
    if (count > 0) *reinterpret_cast<Words<sizeof(chunk)>*>(to) = words;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) to[i] = chunk.values[i];
    }
  }
}

// A chunk's elements as floats, and floats rounded to elements. Two 16-bit elements share a
// register: to take or place them one by one costs an instruction more for each.
template <typename T, int kCount>
__device__ __forceinline__ Chunk<float, kCount> to_floats(const Chunk<T, kCount>& chunk) {
  Chunk<float, kCount> floats;
  if constexpr (std::is_same_v<T, BFloat16>) {
    uint32_t pairs[kCount / 2];
    memcpy(pairs, &chunk, sizeof(pairs));
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      floats.values[2 * i] = __uint_as_float(pairs[i] << 16);
      floats.values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) floats.values[i] = to_float(chunk.values[i]);
  }
  return floats;
}

template <typename T, int kCount>
__device__ __forceinline__ Chunk<T, kCount> from_floats(const Chunk<float, kCount>& floats) {
  Chunk<T, kCount> chunk;
  if constexpr (sizeof(T) == 2) {
    uint32_t pairs[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      pairs[i] = pack<T>(floats.values[2 * i], floats.values[2 * i + 1]);
    }
    memcpy(&chunk, pairs, sizeof(pairs));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) chunk.values[i] = from_float<T>(floats.values[i]);
  }
  return chunk;
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
  }
}

// Calls f(std::true_type) or f(std::false_type).
template <typename F>
void dispatch_bool(bool value, const F& f) {
  value ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace vllm_lite::device
