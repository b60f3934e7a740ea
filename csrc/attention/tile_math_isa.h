// The inner loops of CPU attention: the register-blocked product and the transposed load of keys.
// Only for paged_attention_isa.cpp; what it says about VL_ISA holds here.
#pragma once

#include "attention/attention_work.h"
#include "core/simd.h"

namespace vllm_lite::VL_ISA {
namespace {

// Accumulators fill the registers: 6 x 4 of 32 with AVX-512, 6 x 2 of 16 elsewhere.
constexpr int kBlockRows = 6;
constexpr int kBlockVecs = kWidth == 16 ? 4 : 2;

// Fetches `bytes` from p on into L1; a line that is not mapped is no error.
VL_SIMD void prefetch(const void* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
}

// The rows of a product's B: a float32 tile, or values in the cache, which fetch the next tile's
// keys.
struct TileRows {
  const float* rows;
  int64_t stride;
  const float* operator[](int64_t i) const { return rows + i * stride; }
  void prefetch_next(int64_t, int64_t, int) const {}
};
template <typename T>
struct CacheRows {
  const T* const* rows;
  const T* const* next_rows;
  int64_t offset;
  const T* operator[](int64_t i) const { return rows[i] + offset; }
  void prefetch_next(int64_t i, int64_t column, int count) const {
    prefetch(next_rows[i] + column, count * static_cast<int>(sizeof(T)));
  }
};

template <int kRows, int kVecs, bool kAccumulate, typename Rows>
__attribute__((noinline)) void multiply_block(const float* a, int64_t a_stride, Rows b,
                                              int64_t column, float* c, int64_t c_stride,
                                              int64_t k) {
  c += column;
  FloatVec sums[kRows][kVecs];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      sums[r][j] = kAccumulate ? load(c + r * c_stride + j * kWidth) : zero();
    }
  }
#pragma GCC unroll 1
  for (int64_t i = 0; i < k; ++i) {
    const auto* b_row = b[i] + column;
    b.prefetch_next(i, column, kVecs * kWidth);
    FloatVec row[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) row[j] = load(b_row + j * kWidth);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const FloatVec x = broadcast(a[r * a_stride + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sums[r][j] = fma(x, row[j], sums[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) store(c + r * c_stride + j * kWidth, sums[r][j]);
  }
}

template <int kVecs, bool kAccumulate, typename Rows>
void multiply_rows(int num_rows, const float* a, int64_t a_stride, const Rows& b, int64_t column,
                   float* c, int64_t c_stride, int64_t k) {
  switch (num_rows) {
#define VL_ROWS(n) \
  case n:          \
    return multiply_block<n, kVecs, kAccumulate>(a, a_stride, b, column, c, c_stride, k);
    VL_ROWS(1) VL_ROWS(2) VL_ROWS(3) VL_ROWS(4) VL_ROWS(5) VL_ROWS(6)
#undef VL_ROWS
  }
}

// C[num_rows, vecs * kWidth] = or += A[num_rows, k] * B[k, vecs * kWidth]; num_rows
// is 1..kBlockRows.
template <bool kAccumulate, typename Rows>
void multiply(int num_rows, const float* a, int64_t a_stride, const Rows& b, float* c,
              int64_t c_stride, int64_t k, int vecs) {
  for (int64_t column = 0; vecs > 0;) {
    // 5 vectors as 3 + 2: a block of a single one has too few independent sums.
    int step = vecs < kBlockVecs ? vecs : kBlockVecs;
    if (vecs == kBlockVecs + 1 && kBlockVecs > 2) step = kBlockVecs - 1;
    switch (step) {
#define VL_VECS(n)                                                                     \
  case n:                                                                              \
    if constexpr (n <= kBlockVecs) {                                                   \
      multiply_rows<n, kAccumulate>(num_rows, a, a_stride, b, column, c, c_stride, k); \
    }                                                                                  \
    break;
      VL_VECS(1) VL_VECS(2) VL_VECS(3) VL_VECS(4)
#undef VL_VECS
    }
    column += step * kWidth;
    vecs -= step;
  }
}

// Columns t .. t + kWidth - 1 of the transposed K tile, from kWidth rows of the cache.
VL_SIMD void load_keys(const float* const* rows, int head_size, float* tile) {
  for (int d = 0; d < head_size; d += kWidth) {
    FloatVec v[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) v[i] = load(rows[i] + d);
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) store(tile + (d + i) * kTileTokens, v[i]);
  }
}
template <typename T>
VL_SIMD void load_keys(const T* const* rows, int head_size, float* tile) {
  int d = 0;
  FloatVec v[kWidth];
  for (; d + 2 * kWidth <= head_size; d += 2 * kWidth) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) __builtin_memcpy(&v[i].v, rows[i] + d, sizeof(v[i].v));
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      store(tile + (d + 2 * i) * kTileTokens, widen_lower(bits_of(v[i]), T{}));
      store(tile + (d + 2 * i + 1) * kTileTokens, widen_upper(bits_of(v[i]), T{}));
    }
  }
  if (d == head_size) return;
  // Head size 80 with AVX-512: half a vector of pairs is left.
  constexpr int kHalf = kWidth / 2;
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    float pairs[kWidth] = {};
    __builtin_memcpy(pairs, rows[i] + d, kHalf * sizeof(float));
    v[i] = load(pairs);
  }
  transpose(v);
#pragma GCC unroll 16
  for (int i = 0; i < kHalf; ++i) {
    store(tile + (d + 2 * i) * kTileTokens, widen_lower(bits_of(v[i]), T{}));
    store(tile + (d + 2 * i + 1) * kTileTokens, widen_upper(bits_of(v[i]), T{}));
  }
}

}  // namespace
}  // namespace vllm_lite::VL_ISA
