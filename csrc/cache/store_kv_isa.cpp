#include "cache/store_kv.h"
#include "core/kv_layout_cpu.h"
#include "core/parallel_for.h"
#include "core/simd.h"
#include "core/simd_int.h"

namespace vllm_lite::VL_ISA {
namespace {

// A copy is worth a thread from this many bytes on.
constexpr int64_t kGrainBytes = 64 * 1024;

// Vectors in line: a head's row is too short for a call to memcpy to pay.
VL_SIMD void copy_row(char* out, const char* in, int64_t bytes) {
  constexpr int64_t kVecBytes = sizeof(FloatLanes);
  int64_t i = 0;
  for (; i + kVecBytes <= bytes; i += kVecBytes) {
    FloatLanes v;
    __builtin_memcpy(&v, in + i, kVecBytes);
    __builtin_memcpy(out + i, &v, kVecBytes);
  }
  if (i < bytes) __builtin_memcpy(out + i, in + i, bytes - i);
}

// The row's words into a token's place in its strip.
VL_SIMD void scatter_words(char* out, const char* in, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kKeyWordBytes) {
    __builtin_memcpy(out + i * kStripTokens, in + i, kKeyWordBytes);
  }
}

// The row's elements of 16 bits into a token's half of its pair's words. One by one: another thread
// may be writing the other half.
VL_SIMD void scatter_halves(char* out, const char* in, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 2) __builtin_memcpy(out + 2 * i, in + i, 2);
}

// A token's place in a head's two strips.
struct Place {
  char* keys;
  char* values;
  int64_t lane;
};

// Calls store(place, key, value) for each token that has a slot and each head.
template <typename Store>
VL_SIMD void for_each_head(const StoreKvParams& params, int64_t element_bytes, int64_t row_bytes,
                           const Store& store) {
  const int64_t head_bytes = params.block_size * row_bytes;
  const int64_t half_block_bytes = params.num_kv_heads * head_bytes;  // K or V of a block
  const int64_t head_elements_bytes = params.head_size * element_bytes;
  const int64_t grain = 1 + kGrainBytes / (2 * params.num_kv_heads * head_elements_bytes);
  parallel_for(params.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = params.slot_mapping[token];
      if (slot < 0) continue;
      const int64_t block = slot / params.block_size, offset = slot % params.block_size;
      const int64_t lane = offset % kStripTokens;
      char* const strip = static_cast<char*>(params.kv_cache) + 2 * block * half_block_bytes +
                          (offset - lane) * row_bytes;
      const char* key =
          static_cast<const char*>(params.key) + token * params.key_token_stride * element_bytes;
      const char* value = static_cast<const char*>(params.value) +
                          token * params.value_token_stride * element_bytes;
      for (int32_t head = 0; head < params.num_kv_heads; ++head) {
        char* const keys = strip + head * head_bytes;
        store(Place{keys, keys + half_block_bytes, lane}, key + head * head_elements_bytes,
              value + head * head_elements_bytes);
      }
    }
  });
}

void store_as_is(const StoreKvParams& params, int64_t element_bytes) {
  const int64_t row_bytes = params.head_size * element_bytes;
  for_each_head(params, element_bytes, row_bytes,
                [&](const Place& place, const char* key, const char* value) {
                  scatter_words(place.keys + place.lane * kKeyWordBytes, key, row_bytes);
                  if (element_bytes == 2) {
                    const int64_t pair_offset = place.lane / 2 * 2 * row_bytes;
                    scatter_halves(place.values + pair_offset + place.lane % 2 * 2, value,
                                   row_bytes);
                  } else {
                    copy_row(place.values + place.lane * row_bytes, value, row_bytes);
                  }
                });
}

// ---- int8

template <typename T>
VL_SIMD void store_int8(const Place& place, const T* key, const T* value, int head_size) {
  const int64_t scale_offset = kStripTokens * int64_t{head_size} + place.lane * kKvScaleBytes;
  const Quantisation of_key = quantisation_of(key, head_size, kMostInt8);
  char* const words = place.keys + place.lane * kKeyWordBytes;
  for (int d = 0; d < head_size; d += kWidth) {
    int8_t bytes[kWidth];
    store_int(bytes, quantise(load(key + d), of_key));
    scatter_words(words + d * kStripTokens, reinterpret_cast<const char*>(bytes), kWidth);
  }
  __builtin_memcpy(place.keys + scale_offset, &of_key.scale, kKvScaleBytes);
  const Quantisation of_value = quantisation_of(value, head_size, kMostInt8);
  auto* const row = reinterpret_cast<int8_t*>(place.values) + place.lane * head_size;
  for (int d = 0; d < head_size; d += kWidth) {
    store_int(row + d, quantise(load(value + d), of_value));
  }
  __builtin_memcpy(place.values + scale_offset, &of_value.scale, kKvScaleBytes);
}

template <typename T>
void store_as_int8(const StoreKvParams& params) {
  const int head_size = params.head_size;
  for_each_head(params, sizeof(T), head_size + kKvScaleBytes,
                [&](const Place& place, const char* key, const char* value) {
                  store_int8(place, reinterpret_cast<const T*>(key),
                             reinterpret_cast<const T*>(value), head_size);
                });
}

}  // namespace

void store_kv(const StoreKvParams& params) {
  if (params.kv_dtype != KvDType::kInt8) {
    return store_as_is(params, params.dtype == DType::kFloat32 ? 4 : 2);
  }
  switch (params.dtype) {
    case DType::kFloat32:
      return store_as_int8<float>(params);
    case DType::kBFloat16:
      return store_as_int8<BFloat16>(params);
    case DType::kFloat16:
      return store_as_int8<Float16>(params);
  }
}

}  // namespace vllm_lite::VL_ISA
