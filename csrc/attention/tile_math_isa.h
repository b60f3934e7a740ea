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
constexpr int strip_bytes(int head_size) {
  return kStripTokens * head_size * static_cast<int>(sizeof(T)) + (kHasScales<T> ? 64 : 0);
}

// The scales behind a strip's `elements`, from that of the first on.
VL_SIMD FloatVec scales_behind(const int8_t* elements) {
  return load(reinterpret_cast<const float*>(elements));
}

// Into L1; into L2 with AMX, whose tiles come from there fast enough and are many lines at once.
VL_SIMD void prefetch(const char* line) {
#if defined(VL_ISA_amx)
  __builtin_prefetch(line, 0, 2);
#else
  __builtin_prefetch(line);
#endif
}

// Some strips in turn, fetched eight lines at a time: line by line it would cost as much as what it
// goes with.
struct Fetch {
  static constexpr int kLineBytes = 64, kGroupBytes = 8 * kLineBytes;

  const char* const* strips;
  int num_strips;
  int strip_bytes;
  int strip = 0, offset = 0;

  // So many groups at each of `steps` fetch all.
  VL_SIMD int groups_of_step(const Fetch& fetch, int steps) {
    const int strip_groups = (fetch.strip_bytes + kGroupBytes - 1) / kGroupBytes;
    return (fetch.num_strips * strip_groups + steps - 1) / steps;
  }
  VL_SIMD void groups(Fetch& fetch, int count) {
    for (; count > 0 && fetch.strip < fetch.num_strips; --count) {
      const char* const at = fetch.strips[fetch.strip] + fetch.offset;
      const int left = fetch.strip_bytes - fetch.offset;
      if (left >= kGroupBytes) {
#pragma GCC unroll 8
        for (int i = 0; i < kGroupBytes; i += kLineBytes) prefetch(at + i);
      } else {
        for (int i = 0; i < left; i += kLineBytes) prefetch(at + i);
      }
      fetch.offset += kGroupBytes;
      if (left <= kGroupBytes) {
        fetch.offset = 0;
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

// How values of type T are multiplied. kArePairs: the layout has words of two tokens. kMeetPairs:
// both are multiplied at once, with weights of 16 bits; otherwise one after the other in float32.
template <typename T>
constexpr bool kArePairs = sizeof(T) == 2;
#if defined(VL_ISA_avx512_bf16)
template <typename T>
constexpr bool kMeetPairs = kArePairs<T>;
#else
template <typename T>
constexpr bool kMeetPairs = false;
#endif

// Elements of a strip before those of a token or, where there are pairs, of its pair.
template <typename T>
VL_SIMD int value_offset(int token, int head_size) {
  return kArePairs<T> ? token / 2 * 2 * head_size : token * head_size;
}

// The value of one token: of a row or, of a pair, the lower or the upper half.
template <int kHalf, typename T>
VL_SIMD FloatVec load_value(const T* from) {
  if constexpr (kArePairs<T>) {
    IntLanes words;
    __builtin_memcpy(&words, from, sizeof(words));
    return kHalf == 0 ? widen_lower(words, T{}) : widen_upper(words, T{});
  } else {
    return load(from);
  }
}

// Adds weight * value to each row's sums.
template <int kHalf, typename T, int kRows, int kVecs>
VL_SIMD void add_token(const float* weights, const T* from, FloatVec (&to)[kRows][kVecs]) {
  constexpr int kStride = kWidth * (kArePairs<T> ? 2 : 1);
  FloatVec value[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    value[v] = load_value<kHalf>(from + v * kStride);
    keep_in_register(value[v].v);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const FloatVec weight = broadcast(weights[r * kTileTokens]);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) to[r][v] = fma(weight, value[v], to[r][v]);
  }
}

#if defined(VL_ISA_avx512_bf16)
// e^x for x <= 0: 2^n times a minimax polynomial of the rest, within 2^-17 of itself (it is rounded
// to bfloat16, by up to 2^-8). Below 2^-126, as for -infinity, it is 0; a NaN stays one.
VL_SIMD FloatVec weight_of_score(FloatVec x) {
  const __m512 t = (__m512)mul(x, broadcast(0x1.715476p0f)).v;
  const __m512 n = _mm512_maskz_roundscale_ps(kAllLanes, t, 0);
  const FloatVec f = sub({(FloatLanes)t}, {(FloatLanes)n});
  FloatVec q = broadcast(9.582852945e-03f);
  q = fma(q, f, broadcast(5.590642616e-02f));
  q = fma(q, f, broadcast(2.402409911e-01f));
  q = fma(q, f, broadcast(6.931241751e-01f));
  q = fma(q, f, broadcast(1.0f));
  const __mmask16 is_normal = _mm512_cmp_ps_mask(t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return {(FloatLanes)_mm512_maskz_scalef_ps(is_normal, (__m512)q.v, n)};
}

// Returns what they have been rounded to.
VL_SIMD FloatVec store_rounded(BFloat16* to, FloatVec weights) {
  const __m256bh rounded = _mm512_maskz_cvtneps_pbh(kAllLanes, (__m512)weights.v);
  __builtin_memcpy(to, &rounded, sizeof(rounded));
  return from_bits(zero_extend((HalfLanes)rounded) << 16);
}

// As add_token, of a pair of tokens, of which `mask` hides one or none: a hidden one's weight is 0,
// but its value may be a NaN. The weights are the first half of each row's floats.
template <int kRows, int kVecs>
VL_SIMD void add_pair(const float* weights, int pair, const BFloat16* from, int32_t mask,
                      FloatVec (&to)[kRows][kVecs]) {
  IntLanes value[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    __builtin_memcpy(&value[v], from + v * 2 * kWidth, sizeof(value[v]));
    value[v] &= mask;
    keep_in_register(value[v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    int32_t weight;
    __builtin_memcpy(&weight, weights + r * kTileTokens + pair, sizeof(weight));
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      to[r][v] = {(FloatLanes)_mm512_dpbf16_ps(
          (__m512)to[r][v].v, (__m512bh)_mm512_set1_epi32(weight), (__m512bh)value[v])};
    }
  }
}
#endif

// Adds weights[kRows, tokens begin .. end-1] * values to the rows' records, from element `column`
// of the head on. Where there are pairs, a row that sees both of one must be given both at once.
template <typename T, int kRows, int kVecs>
__attribute__((noinline)) void value_block(const float* weights, int begin, int end,
                                           const Strips<T>& values, const Strips<char>& ahead,
                                           int column, int head_size, float* records) {
  constexpr int kStep = kArePairs<T> ? 2 : 1;
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
    const int offset = value_offset<T>(t - strip * kStripTokens, head_size) + column * kStep;
    const T* from = values.at[strip] + offset;
    const char* line = ahead.at[strip] + offset * static_cast<int>(sizeof(T));
    const int stop = min_int(end, (strip + 1) * kStripTokens);
    if constexpr (kHasScales<T>) {
      prefetch(ahead.at[strip] + kStripTokens * head_size * static_cast<int>(sizeof(T)));
    }
    constexpr int kBytes = kVecs * kWidth * kStep * static_cast<int>(sizeof(T));
    const int step_bytes = head_size * kStep * static_cast<int>(sizeof(T));
    const auto next = [&](int tokens) __attribute__((always_inline)) {
      t += tokens;
      from += head_size * kStep;
      line += step_bytes;
    };
    const auto fetch = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int i = 0; i < kBytes; i += 64) prefetch(line + i);
    };
    if constexpr (!kArePairs<T>) {
#pragma GCC unroll 1
      for (; t < stop; next(1)) {
        fetch();
        add_token<0>(weights + t, from, to);
      }
#if defined(VL_ISA_avx512_bf16)
    } else if constexpr (kMeetPairs<T>) {
      constexpr int32_t kUpper = static_cast<int32_t>(0xffff0000u);
      if (t % 2 == 1) {
        add_pair(weights, t / 2, from, kUpper, to);
        next(1);
      }
#pragma GCC unroll 1
      for (; t + 1 < stop; next(2)) {
        fetch();
        add_pair(weights, t / 2, from, -1, to);
      }
      if (t < stop) {
        add_pair(weights, t / 2, from, ~kUpper, to);
        next(1);
      }
#endif
    } else {
      if (t % 2 == 1) {
        add_token<1>(weights + t, from, to);
        next(1);
      }
#pragma GCC unroll 1
      for (; t + 1 < stop; next(2)) {
        fetch();
        add_token<0>(weights + t, from, to);
        add_token<1>(weights + t + 1, from, to);
      }
      if (t < stop) {
        add_token<0>(weights + t, from, to);
        next(1);
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

// Values as rows of a token each.
template <typename T>
VL_SIMD void widen_values(const T* from, int head_size, const char* ahead, float* to) {
  constexpr int kStep = kArePairs<T> ? 2 : 1;
  if constexpr (kHasScales<T>) prefetch(ahead + kStripTokens * head_size);
  for (int t = 0; t < kStripTokens; t += kStep, to += kStep * head_size) {
    for (int d = 0; d < head_size; d += kWidth) {
      prefetch(ahead);
      store(to + d, load_value<0>(from));
      if constexpr (kArePairs<T>) store(to + head_size + d, load_value<1>(from));
      from += kStep * kWidth;
      ahead += kStep * kWidth * static_cast<int>(sizeof(T));
    }
  }
}

}  // namespace
}  // namespace vllm_lite::VL_ISA
