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

// Where a token's block is among the prepared ones: a tile of tokens' blocks lie in order.
VL_SIMD int64_t prepared_at(int64_t token, int64_t block, int64_t prepared_tokens,
                            int64_t num_blocks) {
  const int64_t rows = prepared_tokens < kTileTokens ? prepared_tokens : kTileTokens;
  return (token / kTileTokens * num_blocks + block) * rows + token % kTileTokens;
}

// Elements from a block of a tile of tokens to the next, and from a tile to the next.
VL_SIMD int64_t block_stride(const Pass& pass) {
  return (pass.input_tokens < kTileTokens ? pass.input_tokens : kTileTokens) * kBlockColumns;
}
VL_SIMD int64_t tile_stride(const Pass& pass) { return pass.total_blocks * block_stride(pass); }

// The four tiles of sums: from 0 in a first pass, else from what the one before has left.
VL_SIMD void start_sums(const Pass& pass, const float* a, const float* b, const float* c,
                        const float* d) {
  if (pass.is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, a, kSumsStride);
    _tile_loadd(1, b, kSumsStride);
    _tile_loadd(2, c, kSumsStride);
    _tile_loadd(3, d, kSumsStride);
  }
}
VL_SIMD void store_sums(float* a, float* b, float* c, float* d) {
  _tile_stored(0, a, kSumsStride);
  _tile_stored(1, b, kSumsStride);
  _tile_stored(2, c, kSumsStride);
  _tile_stored(3, d, kSumsStride);
}

// The weight comes from memory for the first tokens of a range, which fetch it into L2 so many
// blocks ahead: the processor itself does so within a page only. When a panel ends, it goes on with
// that `step` panels on, in this group or where the next pass begins.
constexpr int64_t kBlocksAhead = 8;
VL_SIMD void fetch_ahead(const Pass& pass, int panel, int step, int64_t block) {
  constexpr int64_t kBlockBytes = DenseBFloat16::kBlockBytes, kLineBytes = 64;
  const int64_t ahead = block + kBlocksAhead, past = ahead - pass.num_blocks;
  const int later = panel + step;
  const uint8_t* from = past < 0 ? pass.panels[panel] + (pass.first_block + ahead) * kBlockBytes
                        : later < kGroupPanels
                            ? pass.panels[later] + (pass.first_block + past) * kBlockBytes
                            : pass.next[later % kGroupPanels] + past * kBlockBytes;
#pragma GCC unroll 16
  for (int64_t i = 0; i < kBlockBytes; i += kLineBytes) __builtin_prefetch(from + i, 0, 2);
}

// 16 tokens by the group's 4 panels, whose weights no later tile of the pass reads.
void multiply_16_tokens(const Pass& pass, int64_t token, float* sums) {
  start_sums(pass, sums, sums + kLanes, sums + 2 * kLanes, sums + 3 * kLanes);
  const int64_t stride = block_stride(pass);
  const auto* input =
      static_cast<const BFloat16*>(pass.input) + token / kTileTokens * tile_stride(pass);
  finish_writes(input);
  for (int64_t b = 0; b < pass.num_blocks; ++b, input += stride) {
    const int64_t at = DenseBFloat16::kLayout.block_offset(pass.first_block + b);
    for (int panel = 0; panel < kGroupPanels; ++panel) fetch_ahead(pass, panel, kGroupPanels, b);
    _tile_loadd(4, input, kTileRowBytes);
    _tile_loadd(6, pass.panels[0] + at, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, pass.panels[1] + at, kTileRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, pass.panels[2] + at, kTileRowBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, pass.panels[3] + at, kTileRowBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  store_sums(sums, sums + kLanes, sums + 2 * kLanes, sums + 3 * kLanes);
}

// 32 tokens by 2 panels, `panel` and the next.
void multiply_32_tokens(const Pass& pass, int64_t token, int panel, float* sums) {
  sums += panel * kLanes;
  float* const later_sums = sums + kTileTokens * kGroupRows;
  start_sums(pass, sums, sums + kLanes, later_sums, later_sums + kLanes);
  const int64_t stride = block_stride(pass);
  const auto* input =
      static_cast<const BFloat16*>(pass.input) + token / kTileTokens * tile_stride(pass);
  const auto* later = input + tile_stride(pass);
  finish_writes(input);
  for (int64_t b = 0; b < pass.num_blocks; ++b, input += stride, later += stride) {
    const int64_t at = DenseBFloat16::kLayout.block_offset(pass.first_block + b);
    if (token == 0) {
      fetch_ahead(pass, panel, 2, b);
      fetch_ahead(pass, panel + 1, 2, b);
    }
    _tile_loadd(4, input, kTileRowBytes);
    _tile_loadd(6, pass.panels[panel] + at, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, pass.panels[panel + 1] + at, kTileRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, later, kTileRowBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_sums(sums, sums + kLanes, later_sums, later_sums + kLanes);
}

struct TileProduct {
  static constexpr int64_t kElementBytes = sizeof(BFloat16);
  // 32 tokens by 64 rows of sums go to memory and back between passes: longer than with vectors.
  static constexpr int64_t kBlocks = 8 * kPassBlocks;

  // Sums of a single pass stay in L1: each 32 tokens' in the place of those before.
  template <typename Finish>
  static void multiply(const Pass& pass, uint8_t*, Finish finish) {
    for (int64_t token = 0; token < pass.num_tokens; token += 2 * kTileTokens) {
      const bool is_only = pass.is_first && pass.is_last;
      float* const sums = pass.sums + (is_only ? 0 : token * kGroupRows);
      const int64_t left = pass.num_tokens - token;
      if (left <= kTileTokens) {
        multiply_16_tokens(pass, token, sums);
      } else {
        multiply_32_tokens(pass, token, 0, sums);
        if (pass.num_panels > 2) multiply_32_tokens(pass, token, 2, sums);
      }
      if (pass.is_last) finish(token, left < 2 * kTileTokens ? left : 2 * kTileTokens, sums);
    }
  }
};

}  // namespace
}  // namespace vllm_lite::VL_ISA
