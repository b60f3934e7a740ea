// The inner products of CPU attention by AMX tiles, of bfloat16 rows and a bfloat16 cache. Only for
// paged_attention_isa.cpp.
//
// A block is up to 16 rows. Keys and values lie in the cache as the tiles want them (pairs of a
// token's elements, pairs of tokens): a strip's keys are tiles of 32 elements of the head, a
// strip's values tiles of 16 elements. TDPBF16PS treats every row of a tile apart, and adds the 32
// (16) products of one step to a sum at once: what a row gets depends neither on the other rows nor
// on how many there are. Products with a weight of 0 change nothing, so that strips may be added
// whole, as long as no hidden value is infinite or NaN.
#pragma once

#include "attention/tile_math_isa.h"
#include "core/amx.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int kKeyElements = 32;    // of the head, in a tile of keys
constexpr int kValueElements = 16;  // in a tile of values; and of keys, where the head ends with 16

// Rows of each block: equal parts; the last is filled up.
constexpr int rows_of_tiles(int num_rows) {
  const int blocks = (num_rows + kTileRows - 1) / kTileRows;
  return (num_rows + blocks - 1) / blocks;
}

// 0 to 3 are sums; 4 is 32 numbers of each row and 6 what they meet, 5 and 7 likewise of 16.
TileConfig tiles_of_rows(int rows) {
  TileConfig config;
  for (int tile = 0; tile < 5; ++tile) TileConfig::set(config, tile, rows, kTileRowBytes);
  TileConfig::set(config, 5, rows, kTileRowBytes / 2);
  TileConfig::set(config, 6, kTileRows, kTileRowBytes);
  TileConfig::set(config, 7, kTileRows / 2, kTileRowBytes);
  return config;
}

// A tile's number must be written out: GCC pastes it into the instruction.
template <int kStrips>
VL_SIMD void score_strips(const BFloat16* query, int head_size, const BFloat16* const* keys,
                          Fetch& fetch, int fetch_groups, float* scores) {
  const int64_t query_stride = head_size * static_cast<int64_t>(sizeof(BFloat16));
  constexpr int64_t kStride = kTileTokens * sizeof(float);
  finish_writes(query);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int d = 0;
#define VL_ADD_STRIP(strip, of_query, of_keys)                           \
  if constexpr (strip < kStrips) {                                       \
    _tile_loadd(of_keys, keys[strip] + d * kStripTokens, kTileRowBytes); \
    _tile_dpbf16ps(strip, of_query, of_keys);                            \
  }
  for (; d + kKeyElements <= head_size; d += kKeyElements) {
    Fetch::groups(fetch, fetch_groups);
    _tile_loadd(4, query + d, query_stride);
    VL_ADD_STRIP(0, 4, 6)
    VL_ADD_STRIP(1, 4, 6)
    VL_ADD_STRIP(2, 4, 6)
    VL_ADD_STRIP(3, 4, 6)
  }
  if (d < head_size) {
    Fetch::groups(fetch, fetch_groups);
    _tile_loadd(5, query + d, query_stride);
    VL_ADD_STRIP(0, 5, 7)
    VL_ADD_STRIP(1, 5, 7)
    VL_ADD_STRIP(2, 5, 7)
    VL_ADD_STRIP(3, 5, 7)
  }
#undef VL_ADD_STRIP
  _tile_stored(0, scores, kStride);
  if constexpr (kStrips > 1) _tile_stored(1, scores + kStripTokens, kStride);
  if constexpr (kStrips > 2) _tile_stored(2, scores + 2 * kStripTokens, kStride);
  if constexpr (kStrips > 3) _tile_stored(3, scores + 3 * kStripTokens, kStride);
}

// scores[rows, kTileTokens] = query[rows, head_size] * keys, of strips [first, last). Fetches
// `fetch` to its end.
void multiply_keys(const BFloat16* query, int head_size, const Strips<BFloat16>& keys, int first,
                   int last, Fetch& fetch, float* scores) {
  const int steps = (head_size + kKeyElements - 1) / kKeyElements;
  const int groups = Fetch::groups_of_step(fetch, steps);
  scores += first * kStripTokens;
  switch (last - first) {
#define VL_STRIPS(n) \
  case n:            \
    return score_strips<n>(query, head_size, keys.at + first, fetch, groups, scores);
    VL_STRIPS(1) VL_STRIPS(2) VL_STRIPS(3) VL_STRIPS(4)
#undef VL_STRIPS
  }
}

// Adds weights * values of strips [first, last) to kTiles * 16 elements of the rows' records.
template <int kTiles>
VL_SIMD void add_value_tiles(const BFloat16* weights, const Strips<BFloat16>& values, int first,
                             int last, int column, int head_size, Fetch& fetch, int fetch_groups,
                             float* records) {
  constexpr int64_t kWeightsStride = kTileTokens * sizeof(float);
  const int64_t stride = record_floats(head_size) * static_cast<int64_t>(sizeof(float));
  const int64_t values_stride = int64_t{head_size} * 2 * sizeof(BFloat16);
  float* const sums = records + column;
  _tile_loadd(0, sums, stride);
  if constexpr (kTiles > 1) _tile_loadd(1, sums + kValueElements, stride);
  if constexpr (kTiles > 2) _tile_loadd(2, sums + 2 * kValueElements, stride);
  if constexpr (kTiles > 3) _tile_loadd(3, sums + 3 * kValueElements, stride);
  for (int strip = first; strip < last; ++strip) {
    Fetch::groups(fetch, fetch_groups);
    const BFloat16* const from = values.at[strip] + column * 2;
    _tile_loadd(5, weights + strip * kStripTokens, kWeightsStride);
    _tile_loadd(7, from, values_stride);
    _tile_dpbf16ps(0, 5, 7);
    if constexpr (kTiles > 1) {
      _tile_loadd(7, from + 2 * kValueElements, values_stride);
      _tile_dpbf16ps(1, 5, 7);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(7, from + 4 * kValueElements, values_stride);
      _tile_dpbf16ps(2, 5, 7);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(7, from + 6 * kValueElements, values_stride);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, stride);
  if constexpr (kTiles > 1) _tile_stored(1, sums + kValueElements, stride);
  if constexpr (kTiles > 2) _tile_stored(2, sums + 2 * kValueElements, stride);
  if constexpr (kTiles > 3) _tile_stored(3, sums + 3 * kValueElements, stride);
}

// Adds weights[rows, tokens of strips first .. last-1] * values to the rows' records. A row's
// weights are the first half of its kTileTokens floats. Fetches `fetch` to its end.
void multiply_values(const BFloat16* weights, int first, int last, const Strips<BFloat16>& values,
                     int head_size, Fetch& fetch, float* records) {
  constexpr int kColumns = 4 * kValueElements;
  const int steps = (head_size + kColumns - 1) / kColumns * (last - first);
  const int groups = Fetch::groups_of_step(fetch, steps);
  finish_writes(weights);
  for (int column = 0; column < head_size; column += kColumns) {
    switch (min_int(4, (head_size - column) / kValueElements)) {
#define VL_TILES(n)                                                                              \
  case n:                                                                                        \
    add_value_tiles<n>(weights, values, first, last, column, head_size, fetch, groups, records); \
    break;
      VL_TILES(1) VL_TILES(2) VL_TILES(3) VL_TILES(4)
#undef VL_TILES
    }
  }
}

// Copies a strip's values, zeros in place of tokens outside [begin, end). Whether all are finite.
bool copy_shown(const BFloat16* values, int begin, int end, int head_size, BFloat16* to) {
  const IntLanes exponents = broadcast_int(0x7f807f80);
  __mmask32 not_finite = 0;
  for (int token = 0; token < kStripTokens; token += 2) {
    const auto half = [&](int t) { return t >= begin && t < end ? 0xffffu : 0u; };
    const auto mask = static_cast<int32_t>(half(token) | half(token + 1) << 16);
    for (int d = 0; d < head_size; d += kWidth, values += 2 * kWidth, to += 2 * kWidth) {
      IntLanes words;
      __builtin_memcpy(&words, values, sizeof(words));
      words &= mask;
      not_finite |= _mm512_cmpeq_epi16_mask((__m512i)(words & exponents), (__m512i)exponents);
      __builtin_memcpy(to, &words, sizeof(words));
    }
  }
  return not_finite == 0;
}

}  // namespace
}  // namespace vllm_lite::VL_ISA
