// The inner loops of CPU attention: scores and sums over values of a tile, register-blocked.
// Only for paged_attention_isa.cpp; what it says about VL_ISA holds here.
//
// A tile is kTileStrips strips of the cache (kv_layout_cpu.h) or their copies in float32. A vector
// of scores is a vector of tokens, so that no sum runs across lanes. Both loops take their terms
// one after the other: how rows and columns are blocked never changes a bit. They fetch what is
// read next into the cache, line by line as they go, because the processor's own prefetcher starts
// anew at every block of a block table.
#pragma once

#include "attention/attention_work.h"
#include "core/kv_layout_cpu.h"
#include "core/simd.h"
#include "core/simd_int.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int kTileStrips = kTileTokens / kStripTokens;
constexpr int kStripVecs = kStripTokens / kWidth;
constexpr int kTileVecs = kTileTokens / kWidth;

// Rows and vectors of a register block: accumulators fill the registers, 24 of 32 with AVX-512, 12
// of 16 elsewhere.
constexpr int kMaxBlockRows = kWidth == 16 ? 8 : 6;
constexpr int kMaxBlockVecs = 4;
constexpr int block_vecs(int rows) {
  if (kWidth == 16) return rows <= 6 ? 4 : 2;
  return rows <= 2 ? 4 : 2;
}

// Rows of each block but the last: equal parts.
constexpr int rows_of_block(int num_rows) {
  const int most = num_rows <= kMaxBlockRows ? kMaxBlockRows : 6;
  const int blocks = (num_rows + most - 1) / most;
  return (num_rows + blocks - 1) / blocks;
}

VL_SIMD int min_int(int a, int b) { return a < b ? a : b; }
VL_SIMD int max_int(int a, int b) { return a > b ? a : b; }

// Pointers into the tile's strips: where its keys or its values of type T begin.
template <typename T>
struct Strips {
  const T* at[kTileStrips];
};

template <typename T>
VL_SIMD Strips<char> lines_of(const Strips<T>& strips) {
  Strips<char> lines;
  for (int i = 0; i < kTileStrips; ++i) lines.at[i] = reinterpret_cast<const char*>(strips.at[i]);
  return lines;
}

// Whether a strip ends with its tokens' scales.
template <typename T>
constexpr bool kHasScales = false;
template <>
constexpr bool kHasScales<int8_t> = true;

template <typename T>
constexpr int strip_lines(int head_size) {
  return kStripTokens * head_size * static_cast<int>(sizeof(T)) / 64 + (kHasScales<T> ? 1 : 0);
}

// The scales behind a strip's `elements`, from that of the first on.
VL_SIMD FloatVec scales_behind(const int8_t* elements) {
  return load(reinterpret_cast<const float*>(elements));
}

VL_SIMD void prefetch(const char* line) { __builtin_prefetch(line); }

// Lines of some strips in turn, fetched a few at a time.
struct Fetch {
  const char* const* strips;
  int num_strips;
  int strip_lines;
  int strip = 0, line = 0;
  VL_SIMD void lines(Fetch& fetch, int count) {
    for (; count > 0 && fetch.strip < fetch.num_strips; --count) {
      prefetch(fetch.strips[fetch.strip] + fetch.line * 64);
      if (++fetch.line == fetch.strip_lines) {
        fetch.line = 0;
        ++fetch.strip;
      }
    }
  }
};

// ---- scores

// How keys of type T are multiplied: a word of the layout holds kParts parts, each of which meets
// one number of the query. load_query() returns what the query's numbers are to be multiplied with;
// products() makes a sum the products, given what stands behind the words it was made of.
// kCopies: many rows may as well multiply a copy of the keys in float32, bit for bit.
template <typename T>
struct Keys {  // pairs of 16 bits
  using Query = float;
  using Part = FloatLanes;
  using Sum = FloatVec;
  static constexpr int kParts = 2;
  static constexpr bool kCopies = true;
  VL_SIMD float load_query(const T* from, int head_size, Query* to) {
    for (int d = 0; d < head_size; d += kWidth) store(to + d, VL_ISA::load(from + d));
    return 1;
  }
  VL_SIMD Part load(const T* p, int part) {
    IntLanes words;
    __builtin_memcpy(&words, p, sizeof(words));
    return (part == 0 ? widen_lower(words, T{}) : widen_upper(words, T{})).v;
  }
  VL_SIMD Sum multiply_add(Query query, Part keys, Sum sum) {
    return fma(broadcast(query), {keys}, sum);
  }
  VL_SIMD FloatVec products(Sum sum, const T*) { return sum; }
};
template <>
struct Keys<float> {
  using Query = float;
  using Part = FloatLanes;
  using Sum = FloatVec;
  static constexpr int kParts = 1;
  static constexpr bool kCopies = false;
  VL_SIMD float load_query(const float* from, int head_size, Query* to) {
    __builtin_memcpy(to, from, sizeof(float) * head_size);
    return 1;
  }
  VL_SIMD Part load(const float* p, int) { return VL_ISA::load(p).v; }
  VL_SIMD Sum multiply_add(Query query, Part keys, Sum sum) {
    return fma(broadcast(query), {keys}, sum);
  }
  VL_SIMD FloatVec products(Sum sum, const float*) { return sum; }
};
// The query in 16 bits and a scale, which costs 2^-16 of its largest number. All sums are exact.
// Part 0 is bytes 0 and 2 of a word, part 1 bytes 1 and 3, each widened to a pair of 16 bits.
template <>
struct Keys<int8_t> {
  using Query = int32_t;
  using Part = IntLanes;
  using Sum = IntLanes;
  static constexpr int kParts = 2;
  static constexpr bool kCopies = false;
  template <typename T>
  VL_SIMD float load_query(const T* from, int head_size, Query* to) {
    const Quantisation quantisation = quantisation_of(from, head_size, 32767);
    auto* const halves = reinterpret_cast<int16_t*>(to);
    const IntLanes i = lane_index();
    const IntLanes order = (i & ~3) | (i & 1) << 1 | (i >> 1 & 1);
    for (int d = 0; d < head_size; d += kWidth) {
      const IntLanes numbers = quantise(VL_ISA::load(from + d), quantisation);
      store_int(halves + d, __builtin_shuffle(numbers, order));
    }
    return quantisation.scale;
  }
  VL_SIMD Part load(const int8_t* p, int part) {
    typedef int16_t Halves __attribute__((vector_size(kWidth * 4)));
    Halves halves;
    __builtin_memcpy(&halves, p, sizeof(halves));
    return (IntLanes)((part == 0 ? halves << 8 : halves) >> 8);
  }
  VL_SIMD Sum multiply_add(Query query, Part keys, Sum sum) {
    return multiply_add_pairs(keys, query, sum);
  }
  VL_SIMD FloatVec products(Sum sum, const int8_t* behind) {
    return mul(from_int(sum), scales_behind(behind));
  }
};
#if defined(VL_ISA_avx512_bf16)
// Pairs meet pairs.
template <>
struct Keys<BFloat16> {
  using Query = int32_t;
  using Part = IntLanes;
  using Sum = FloatVec;
  static constexpr int kParts = 1;
  static constexpr bool kCopies = false;
  VL_SIMD float load_query(const BFloat16* from, int head_size, Query* to) {
    __builtin_memcpy(to, from, sizeof(BFloat16) * head_size);
    return 1;
  }
  VL_SIMD Part load(const BFloat16* p, int) {
    IntLanes words;
    __builtin_memcpy(&words, p, sizeof(words));
    return words;
  }
  VL_SIMD Sum multiply_add(Query query, Part keys, Sum sum) {
    return {(FloatLanes)_mm512_dpbf16_ps((__m512)sum.v, (__m512bh)_mm512_set1_epi32(query),
                                         (__m512bh)keys)};
  }
  VL_SIMD FloatVec products(Sum sum, const BFloat16*) { return sum; }
};
#endif

template <typename T>
constexpr int kWordElements = kKeyWordBytes / static_cast<int>(sizeof(T));

// scores[kRows, kVecs * kWidth] = query[kRows, num_words * kParts] * keys, from vector `first_vec`
// of the tile on; without what load_query() has returned.
template <typename T, int kRows, int kVecs>
__attribute__((noinline)) void score_block(const typename Keys<T>::Query* query, int num_words,
                                           const Strips<T>& keys, const Strips<char>& ahead,
                                           int first_vec, float* scores) {
  constexpr int kWordStride = kStripTokens * kWordElements<T>;
  const int query_stride = num_words * Keys<T>::kParts;
  const T* columns[kVecs];
  const char* lines[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    const int vec = first_vec + v;
    columns[v] = keys.at[vec / kStripVecs] + vec % kStripVecs * kWidth * kWordElements<T>;
    lines[v] = ahead.at[vec / kStripVecs / 2];
  }
  typename Keys<T>::Sum sums[kRows][kVecs] = {};
  if constexpr (kHasScales<T>) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v += 2 * kStripVecs) prefetch(lines[v] + num_words * 64);
  }
#pragma GCC unroll 1
  for (int word = 0; word < num_words; ++word) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v += 2 * kStripVecs) prefetch(lines[v] + word * 64);
#pragma GCC unroll 2
    for (int part = 0; part < Keys<T>::kParts; ++part) {
      typename Keys<T>::Part column[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        column[v] = Keys<T>::load(columns[v] + word * kWordStride, part);
        keep_in_register(column[v]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto x = query[r * query_stride + word * Keys<T>::kParts + part];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          sums[r][v] = Keys<T>::multiply_add(x, column[v], sums[r][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      store(scores + r * kTileTokens + (first_vec + v) * kWidth,
            Keys<T>::products(sums[r][v], columns[v] + num_words * kWordStride));
    }
  }
}

// scores[num_rows, kTileTokens] at least for tokens begin .. end-1; num_rows is 1..kMaxBlockRows.
template <typename T>
void multiply_keys(int num_rows, const typename Keys<T>::Query* query, int num_words,
                   const Strips<T>& keys, const Strips<char>& ahead, int begin, int end,
                   float* scores) {
  switch (num_rows) {
#define VL_ROWS(n)                                                                   \
  case n:                                                                            \
    if constexpr (n <= kMaxBlockRows) {                                              \
      constexpr int kVecs = block_vecs(n), kTokens = kVecs * kWidth;                 \
      for (int t = begin / kTokens * kTokens; t < end; t += kTokens) {               \
        score_block<T, n, kVecs>(query, num_words, keys, ahead, t / kWidth, scores); \
      }                                                                              \
    }                                                                                \
    return;
    VL_ROWS(1) VL_ROWS(2) VL_ROWS(3) VL_ROWS(4) VL_ROWS(5) VL_ROWS(6) VL_ROWS(7) VL_ROWS(8)
#undef VL_ROWS
  }
}

// ---- values

// Adds weights[kRows, tokens begin .. end-1] * values to the rows' records, from element `column`
// of the head on.
template <typename T, int kRows, int kVecs>
__attribute__((noinline)) void value_block(const float* weights, int begin, int end,
                                           const Strips<T>& values, const Strips<char>& ahead,
                                           int column, int head_size, float* records) {
  const int64_t record = record_floats(head_size);
  records += column;
  FloatVec to[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) to[r][v] = load(records + r * record + v * kWidth);
  }
  for (int t = begin; t < end;) {
    const int strip = t / kStripTokens;
    const int offset = (t - strip * kStripTokens) * head_size + column;
    const T* row = values.at[strip] + offset;
    const char* line = ahead.at[strip] + offset * static_cast<int>(sizeof(T));
    const int stop = min_int(end, (strip + 1) * kStripTokens);
    if constexpr (kHasScales<T>) {
      prefetch(ahead.at[strip] + kStripTokens * head_size * static_cast<int>(sizeof(T)));
    }
#pragma GCC unroll 1
    for (; t < stop; ++t, row += head_size, line += head_size * static_cast<int>(sizeof(T))) {
#pragma GCC unroll 4
      for (int i = 0; i < kVecs * kWidth * static_cast<int>(sizeof(T)); i += 64) prefetch(line + i);
      FloatVec value[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        value[v] = load(row + v * kWidth);
        keep_in_register(value[v].v);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const FloatVec weight = broadcast(weights[r * kTileTokens + t]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) to[r][v] = fma(weight, value[v], to[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) store(records + r * record + v * kWidth, to[r][v]);
  }
}

template <typename T, int kRows>
void value_blocks(const float* weights, int begin, int end, const Strips<T>& values,
                  const Strips<char>& ahead, int head_size, float* records) {
  constexpr int kMost = block_vecs(kRows);
  int vecs = head_size / kWidth;
  for (int column = 0; vecs > 0;) {
    // 5 vectors as 3 + 2: a block of a single one has too few independent sums.
    const int step = vecs == kMost + 1 && kMost > 2 ? kMost - 1 : min_int(vecs, kMost);
    switch (step) {
#define VL_VECS(n)                                                                              \
  case n:                                                                                       \
    if constexpr (n <= kMost) {                                                                 \
      value_block<T, kRows, n>(weights, begin, end, values, ahead, column, head_size, records); \
    }                                                                                           \
    break;
      VL_VECS(1) VL_VECS(2) VL_VECS(3) VL_VECS(4)
#undef VL_VECS
    }
    column += step * kWidth;
    vecs -= step;
  }
}

// Adds weights[num_rows, tokens begin .. end-1] * values to the rows' records; num_rows is
// 1..kMaxBlockRows.
template <typename T>
void multiply_values(int num_rows, const float* weights, int begin, int end,
                     const Strips<T>& values, const Strips<char>& ahead, int head_size,
                     float* records) {
  switch (num_rows) {
#define VL_ROWS(n)                                                                \
  case n:                                                                         \
    if constexpr (n <= kMaxBlockRows) {                                           \
      value_blocks<T, n>(weights, begin, end, values, ahead, head_size, records); \
    }                                                                             \
    return;
    VL_ROWS(1) VL_ROWS(2) VL_ROWS(3) VL_ROWS(4) VL_ROWS(5) VL_ROWS(6) VL_ROWS(7) VL_ROWS(8)
#undef VL_ROWS
  }
}

// ---- copies in float32, of whole strips

// Keys as the layout has them for float32: one word per element.
template <typename T>
VL_SIMD void widen_keys(const T* from, int num_words, const char* ahead, float* to) {
  for (int word = 0; word < num_words; ++word) {
    prefetch(ahead + word * 64);
    for (int v = 0; v < kStripVecs; ++v) {
      const T* words = from + (word * kStripTokens + v * kWidth) * kWordElements<T>;
#pragma GCC unroll 2
      for (int part = 0; part < Keys<T>::kParts; ++part) {
        store(to + (word * Keys<T>::kParts + part) * kStripTokens + v * kWidth,
              FloatVec{Keys<T>::load(words, part)});
      }
    }
  }
}

template <typename T>
VL_SIMD void widen_values(const T* from, int head_size, const char* ahead, float* to) {
  constexpr int kLineElements = 64 / static_cast<int>(sizeof(T));
  if constexpr (kHasScales<T>) prefetch(ahead + kStripTokens * head_size);
  for (int i = 0; i < kStripTokens * head_size; i += kLineElements) {
    prefetch(ahead + i * static_cast<int>(sizeof(T)));
#pragma GCC unroll 8
    for (int j = 0; j < kLineElements; j += kWidth) store(to + i + j, load(from + i + j));
  }
}

}  // namespace
}  // namespace vllm_lite::VL_ISA
