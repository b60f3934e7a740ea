#include "cache/store_kv.h"
#include "core/kv_layout_cpu.h"
#include "core/parallel_for.h"
#include "core/simd.h"

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

}  // namespace

void store_kv(const StoreKvParams& params) {
  const int64_t element_bytes = params.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t row_bytes = params.head_size * element_bytes;
  const int64_t head_bytes = params.block_size * row_bytes;
  const int64_t half_block_bytes = params.num_kv_heads * head_bytes;  // K or V of a block
  const int64_t grain = 1 + kGrainBytes / (2 * params.num_kv_heads * row_bytes);
  parallel_for(params.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = params.slot_mapping[token];
      if (slot < 0) continue;
      const int64_t block = slot / params.block_size, offset = slot % params.block_size;
      const int64_t lane = offset % kStripTokens, strip_begin = offset - lane;
      char* const keys = static_cast<char*>(params.kv_cache) + 2 * block * half_block_bytes +
                         strip_begin * row_bytes + lane * kKeyWordBytes;
      char* const values = static_cast<char*>(params.kv_cache) +
                           (2 * block + 1) * half_block_bytes + offset * row_bytes;
      const char* key =
          static_cast<const char*>(params.key) + token * params.key_token_stride * element_bytes;
      const char* value = static_cast<const char*>(params.value) +
                          token * params.value_token_stride * element_bytes;
      for (int32_t head = 0; head < params.num_kv_heads; ++head) {
        scatter_words(keys + head * head_bytes, key + head * row_bytes, row_bytes);
        copy_row(values + head * head_bytes, value + head * row_bytes, row_bytes);
      }
    }
  });
}

}  // namespace vllm_lite::VL_ISA
