// The inner loops of the packed product with AMX tiles. Only for linear_isa.cpp.
//
// A tile of the packed bfloat16 weight, 32 columns of a panel, is the B operand as it lies; a tile
// of the prepared input, 16 tokens' 32 columns, the A operand. A tile of sums sees its columns in
// order, one TDPBF16PS per 32, whatever tiles are beside it and however many of its rows are used.
#pragma once

#include "core/amx.h"
#include "ops/linear_pass_isa.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int64_t kTileTokens = kTileRows;
constexpr int64_t kPartTokens = 2 * kTileTokens;
constexpr int kSumsStride = kGroupRows * 4;

// Up to 16 tokens use as many rows of the tiles; more are padded to a multiple of 16.
int64_t padded_tokens(int64_t num_tokens) {
  if (num_tokens <= kTileTokens) return num_tokens;
  return (num_tokens + kTileTokens - 1) / kTileTokens * kTileTokens;
}

// Tiles of a range. 0 to 3 are sums, 4 and 5 input, 6 and 7 weights.
TileConfig tiles_of_range(int64_t num_tokens) {
  const int rows = static_cast<int>(num_tokens < kTileTokens ? num_tokens : kTileTokens);
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) TileConfig::set(config, tile, rows, kTileRowBytes);
  for (int tile = 6; tile < 8; ++tile) TileConfig::set(config, tile, kTileRows, kTileRowBytes);
  return config;
}

class ProductScope {
 public:
  explicit ProductScope(int64_t num_tokens) : tiles_(tiles_of_range(num_tokens)) {}

 private:
  TileScope tiles_;
};

// 16 tokens by the group's 4 panels, whose weights no later tile of the pass reads.
void multiply_16_tokens(const Pass& pass, int64_t token) {
  float* const sums = pass.sums + token * kGroupRows;
  finish_writes(sums);
  _tile_loadd(0, sums, kSumsStride);
  _tile_loadd(1, sums + kLanes, kSumsStride);
  _tile_loadd(2, sums + 2 * kLanes, kSumsStride);
  _tile_loadd(3, sums + 3 * kLanes, kSumsStride);
  const auto* input = static_cast<const BFloat16*>(pass.input) + token * kBlockColumns;
  for (int64_t b = 0; b < pass.num_blocks; ++b, input += pass.input_tokens * kBlockColumns) {
    const int64_t at = DenseBFloat16::kLayout.block_offset(pass.first_block + b);
    _tile_loadd(4, input, kTileRowBytes);
    _tile_stream_loadd(6, pass.panels[0] + at, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, pass.panels[1] + at, kTileRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stream_loadd(6, pass.panels[2] + at, kTileRowBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_stream_loadd(7, pass.panels[3] + at, kTileRowBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(1, sums + kLanes, kSumsStride);
  _tile_stored(2, sums + 2 * kLanes, kSumsStride);
  _tile_stored(3, sums + 3 * kLanes, kSumsStride);
}

// 32 tokens by 2 panels, `panel` and the next.
void multiply_32_tokens(const Pass& pass, int64_t token, int panel) {
  float* const sums = pass.sums + token * kGroupRows + panel * kLanes;
  float* const later_sums = sums + kTileTokens * kGroupRows;
  finish_writes(sums);
  _tile_loadd(0, sums, kSumsStride);
  _tile_loadd(1, sums + kLanes, kSumsStride);
  _tile_loadd(2, later_sums, kSumsStride);
  _tile_loadd(3, later_sums + kLanes, kSumsStride);
  const auto* input = static_cast<const BFloat16*>(pass.input) + token * kBlockColumns;
  for (int64_t b = 0; b < pass.num_blocks; ++b, input += pass.input_tokens * kBlockColumns) {
    const int64_t at = DenseBFloat16::kLayout.block_offset(pass.first_block + b);
    _tile_loadd(4, input, kTileRowBytes);
    _tile_loadd(6, pass.panels[panel] + at, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, pass.panels[panel + 1] + at, kTileRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, input + kTileTokens * kBlockColumns, kTileRowBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(1, sums + kLanes, kSumsStride);
  _tile_stored(2, later_sums, kSumsStride);
  _tile_stored(3, later_sums + kLanes, kSumsStride);
}

struct TileProduct {
  static constexpr int64_t kElementBytes = sizeof(BFloat16);
  // 32 tokens by 64 rows of sums go to memory and back in a pass: longer than with vectors.
  static constexpr int64_t kBlocks = 4 * kPassBlocks;

  static void multiply(const Pass& pass, uint8_t*) {
    int64_t token = 0;
    for (; token + kTileTokens < pass.num_tokens; token += 2 * kTileTokens) {
      multiply_32_tokens(pass, token, 0);
      if (pass.num_panels > 2) multiply_32_tokens(pass, token, 2);
    }
    if (token < pass.num_tokens) multiply_16_tokens(pass, token);
  }
};

}  // namespace
}  // namespace vllm_lite::VL_ISA
