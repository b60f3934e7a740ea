// The inner loops of the packed product with AMX tiles. Only for linear_isa.cpp.
//
// A tile of the packed bfloat16 weight, 32 columns of a panel, is the B operand as it lies; a tile
// of the input, 16 tokens' 32 columns, the A operand, read from the input's own rows. A tile of
// sums sees its columns in order, one TDPBF16PS per 32, whatever tiles are beside it and however
// many of its rows are used.
#pragma once

#include "core/amx.h"
#include "ops/linear_pass_isa.h"
#include "ops/silu_isa.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int64_t kTileTokens = kTileRows;
constexpr int64_t kPartTokens = 2 * kTileTokens;
constexpr int kSumsStride = kGroupRows * 4;

// Up to 16 tokens use as many rows of the tiles. Of more, the last 16 are a tile, even if some of
// them are in the one before too: twice the same sums.
int64_t tile_rows(int64_t num_tokens) {
  return num_tokens < kTileTokens ? num_tokens : kTileTokens;
}

// Tiles of a range. 0 to 3 are sums, 4 and 5 input, 6 and 7 weights.
TileConfig tiles_of_range(int64_t num_tokens) {
  const int rows = static_cast<int>(tile_rows(num_tokens));
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

// Rows of whole blocks, which most inputs are without preparation.
constexpr bool kReadsRows = true;
int64_t padded_tokens(int64_t num_tokens) { return num_tokens; }
VL_SIMD int64_t prepared_at(int64_t token, int64_t block, int64_t, int64_t num_blocks) {
  return token * num_blocks + block;
}

VL_SIMD const BFloat16* input_of(const Pass& pass, int64_t token) {
  return static_cast<const BFloat16*>(pass.input) + token * pass.call->prepared_stride;
}
VL_SIMD int64_t input_row_bytes(const Pass& pass) {
  return pass.call->prepared_stride * static_cast<int64_t>(sizeof(BFloat16));
}

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
// blocks ahead: the processor itself does so within a page only. It does the rest for every fourth
// line; more of them would take the line buffers that the tile loads need. When a panel ends, it
// goes on with that `step` panels on, in this group or where the next pass begins.
constexpr int64_t kBlocksAhead = 8;
VL_SIMD void fetch_ahead(const Pass& pass, int panel, int step, int64_t block) {
  constexpr int64_t kBlockBytes = DenseBFloat16::kBlockBytes, kFetchBytes = 4 * 64;
  const int64_t ahead = block + kBlocksAhead, past = ahead - pass.num_blocks;
  const int later = panel + step;
  const uint8_t* from = past < 0 ? pass.panels[panel] + (pass.first_block + ahead) * kBlockBytes
                        : later < kGroupPanels
                            ? pass.panels[later] + (pass.first_block + past) * kBlockBytes
                            : pass.next[later % kGroupPanels] + past * kBlockBytes;
#pragma GCC unroll 4
  for (int64_t i = 0; i < kBlockBytes; i += kFetchBytes) __builtin_prefetch(from + i, 0, 2);
}

// 16 tokens by the group's 4 panels, whose weights no later tile of the pass reads.
void multiply_16_tokens(const Pass& pass, int64_t token, float* sums) {
  start_sums(pass, sums, sums + kLanes, sums + 2 * kLanes, sums + 3 * kLanes);
  const BFloat16* input = input_of(pass, token);
  const int64_t stride = input_row_bytes(pass);
  finish_writes(input);
  for (int64_t b = 0; b < pass.num_blocks; ++b, input += kBlockColumns) {
    const int64_t at = DenseBFloat16::kLayout.block_offset(pass.first_block + b);
    if (token == 0) {
      for (int panel = 0; panel < kGroupPanels; ++panel) fetch_ahead(pass, panel, kGroupPanels, b);
    }
    _tile_loadd(4, input, stride);
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

// Sums of 32 tokens by 2 panels on their way to an out of bfloat16: two tokens after each block of
// the next 32 tokens' product, whose tiles take the time anyway.
struct Outgoing {
  const float* sums;
  BFloat16* out[2];  // of either tile's first token
  int64_t out_stride;
  FloatVec bias[2];
  bool is_gated;
  int64_t num_pairs;  // 0 if there are none

  __attribute__((always_inline)) void write_pair(int64_t pair) const {
    const int64_t row = 2 * pair % kTileTokens;
    const float* const from = sums + 2 * pair * kGroupRows;
    BFloat16* const to = out[pair / (kTileTokens / 2)] + row * out_stride;
    write(from, to);
    write(from + kGroupRows, to + out_stride);
  }
  __attribute__((always_inline)) void write_from(int64_t pair) const {
    for (; pair < num_pairs; ++pair) write_pair(pair);
  }

 private:
  __attribute__((always_inline)) void write(const float* from, BFloat16* to) const {
    const FloatVec low = add(load(from), bias[0]), high = add(load(from + kLanes), bias[1]);
    if (is_gated) return store(to, silu_mul_as<BFloat16>(low, high));
    store(to, low);
    store(to + kLanes, high);
  }
};

// 32 tokens by 2 panels, `panel` and the next. `later` is the second tile's first token. What is
// read again soon stays in L1 as far as it fits: the input if it is all of the range, which the
// next panels need; else the weights, which the next tokens need, and the input is loaded past it.
template <bool kIsRange>
VL_SIMD void multiply_32_tokens(const Pass& pass, int64_t token, int64_t later, int panel,
                                float* sums, const Outgoing& outgoing) {
  float* const later_sums = sums + kTileTokens * kGroupRows;
  start_sums(pass, sums, sums + kLanes, later_sums, later_sums + kLanes);
  const BFloat16* input = input_of(pass, token);
  const BFloat16* later_input = input_of(pass, later);
  const int64_t stride = input_row_bytes(pass);
  finish_writes(input);
  for (int64_t b = 0; b < pass.num_blocks; ++b) {
    const int64_t at = DenseBFloat16::kLayout.block_offset(pass.first_block + b);
    if (token == 0) {
      fetch_ahead(pass, panel, 2, b);
      fetch_ahead(pass, panel + 1, 2, b);
    }
    if constexpr (kIsRange) {
      _tile_loadd(4, input + b * kBlockColumns, stride);
    } else {
      _tile_stream_loadd(4, input + b * kBlockColumns, stride);
    }
    _tile_loadd(6, pass.panels[panel] + at, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, pass.panels[panel + 1] + at, kTileRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kIsRange) {
      _tile_loadd(5, later_input + b * kBlockColumns, stride);
    } else {
      _tile_stream_loadd(5, later_input + b * kBlockColumns, stride);
    }
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (b < outgoing.num_pairs) outgoing.write_pair(b);
  }
  store_sums(sums, sums + kLanes, later_sums, later_sums + kLanes);
  outgoing.write_from(pass.num_blocks);
}

struct TileProduct {
  // So that a pass's part of the input stays in L2 for all their panels.
  static constexpr int64_t kTurnGroups = vllm_lite::kTurnGroups;

  // As many as keep a pass's part of the input within so many bytes.
  static int64_t most_blocks(int64_t num_tokens) {
    constexpr int64_t kInputBytes = 768 << 10;
    return kInputBytes / (num_tokens * kBlockColumns * int64_t{sizeof(BFloat16)});
  }

  static const void* input_at(const LinearCall& call, int64_t token, int64_t block) {
    return static_cast<const BFloat16*>(call.prepared) + token * call.prepared_stride +
           block * kBlockColumns;
  }

  template <typename Finish>
  static void multiply(const Pass& pass, uint8_t*, Finish finish) {
    const int64_t num_tokens = pass.num_tokens;
    const int64_t num_steps = (num_tokens + kTileTokens - 1) / kPartTokens;  // of 17 to 32 tokens
    Outgoing outgoing{};
    for (int panel = 0; panel < pass.num_panels && num_steps > 0; panel += 2) {
      const int64_t num_panels = pass.num_panels - panel < 2 ? 1 : 2;
      const bool is_direct = writes_directly(pass, panel);
      for (int64_t step = 0; step < num_steps; ++step) {
        const int64_t token = step * kPartTokens, left = num_tokens - token;
        const int64_t later = (left < kPartTokens ? num_tokens : token + kPartTokens) - kTileTokens;
        float* const sums = sums_of_step(pass, step) + panel * kLanes;
        if (num_tokens <= kPartTokens) {
          multiply_32_tokens<true>(pass, token, later, panel, sums, outgoing);
        } else {
          multiply_32_tokens<false>(pass, token, later, panel, sums, outgoing);
        }
        outgoing.num_pairs = 0;
        if (is_direct) {
          outgoing = outgoing_of(pass, token, later, panel, sums);
        } else if (pass.is_last) {
          finish(token, kTileTokens, panel, num_panels, sums);
          finish(later, kTileTokens, panel, num_panels, sums + kTileTokens * kGroupRows);
        }
      }
    }
    outgoing.write_from(0);
    if (num_tokens > num_steps * kPartTokens) {
      const int64_t num_rows = tile_rows(num_tokens), token = num_tokens - num_rows;
      float* const sums = sums_of_step(pass, num_steps);
      multiply_16_tokens(pass, token, sums);
      if (pass.is_last) finish(token, num_rows, 0, pass.num_panels, sums);
    }
  }

 private:
  // Sums of a single pass stay in L1: those of two steps in turn.
  static float* sums_of_step(const Pass& pass, int64_t step) {
    const bool is_only = pass.is_first && pass.is_last;
    return pass.sums + (is_only ? step % 2 : step) * kPartTokens * kGroupRows;
  }

  // Whether they are whole panels of out.
  static bool writes_directly(const Pass& pass, int panel) {
    if (!pass.is_last || pass.call->out_dtype != DType::kBFloat16) return false;
    return pass.call->is_gated ||
           pass.group->first_row + (panel + 2) * kPanelRows <= pass.call->rows;
  }
  VL_SIMD Outgoing outgoing_of(const Pass& pass, int64_t token, int64_t later, int panel,
                               const float* sums) {
    const LinearCall& call = *pass.call;
    const int64_t row = pass.group->first_row + panel / (call.is_gated ? 2 : 1) * kPanelRows;
    const int64_t other_row = call.is_gated ? call.rows + row : row + kLanes;
    BFloat16* const out =
        static_cast<BFloat16*>(call.out) + pass.first_token * call.out_stride + row;
    const auto* const bias = static_cast<const BFloat16*>(call.bias);
    const FloatVec none = broadcast(-0.0f);  // leaves every number as it is, -0 too
    return {sums,
            {out + token * call.out_stride, out + later * call.out_stride},
            call.out_stride,
            {bias ? load(bias + row) : none, bias ? load(bias + other_row) : none},
            call.is_gated,
            kTileTokens};
  }
};

}  // namespace
}  // namespace vllm_lite::VL_ISA
