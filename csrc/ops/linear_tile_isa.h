// The inner loops of the packed product with vectors. Only for linear_isa.cpp.
//
// A tile is a few tokens by a few vectors of rows, whose sums stay in registers while the columns
// of a pass, or of a block with scales, go by. Every lane is an output and sees its columns in
// order, whatever the tile's shape: shapes change speed, never a bit.
#pragma once

#include "ops/linear_pass_isa.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int kMaxTileTokens = 6;
constexpr int64_t kPartTokens = 4 * kMaxTileTokens;
constexpr bool kReadsRows = false;
// Vectors of rows beside each other: enough sums to hide the latency of the multiply-add, few
// enough for 32 (AVX-512) or 16 registers.
constexpr int tile_vecs(int tokens) {
  if (kWidth == 16) return kGroupPanels;
  return tokens == 1 ? 8 : tokens == 2 ? 4 : 2;
}

// Which bytes of every block of the next pass a tile fetches while it computes.
struct Fetch {
  int64_t begin, end;
};

constexpr int64_t kLineBytes = 64;

// Fetches them of a panel's block: into L1 or, of dense weights, of which L1 does not hold two
// passes, into L2. Past the weight's end that is no error.
template <typename Format>
VL_SIMD void fetch_next(const Pass& pass, int panel, int64_t block, Fetch fetch) {
  const uint8_t* const from = pass.next[panel] + block * Format::kBlockBytes;
  for (int64_t i = fetch.begin; i < fetch.end; i += kLineBytes) {
    __builtin_prefetch(from + i, 0, Format::kIsDense ? 2 : 3);
  }
}

// Many tokens share a pass's memory traffic: a part of it per row of tiles, that none waits for it.
// With few tokens, four streams of dense weights are what a processor fetches ahead by itself; not
// two, nor the slower pace of quantised ones (Q4_1 at one token: 23 GB/s without, 35 with).
template <typename Format>
VL_SIMD Fetch fetch_of_tiles(int64_t tile, int64_t num_tiles, int tokens_of_tile) {
  if constexpr (Format::kIsWidened) return {0, 0};
  constexpr int64_t kLines = (Format::kBlockBytes + kLineBytes - 1) / kLineBytes;
  const bool are_streams = Format::kIsDense && tile_vecs(tokens_of_tile) >= 4 * kPanelVecs;
  if (num_tiles == 1 && are_streams) return {0, 0};
  return {tile * kLines / num_tiles * kLineBytes, (tile + 1) * kLines / num_tiles * kLineBytes};
}

// Where a tile's vectors of rows are: fewer than a panel's are all of one panel.
template <typename Format, int kVecs>
struct TileRows {
  const uint8_t* panels[kVecs];
  int first_part;
  Place places[kVecs];  // of a block

  VL_SIMD int part(const TileRows& rows, int v) { return rows.first_part + v % kPanelVecs; }
};

// The block's steps [first, last), added to `sums`.
template <typename Format, int kTokens, int kVecs>
VL_SIMD void multiply_steps(const typename Format::Element* input, int first, int last,
                            const TileRows<Format, kVecs>& rows,
                            typename Format::Sum (&sums)[kTokens][kVecs]) {
  using Rows = TileRows<Format, kVecs>;
#pragma GCC unroll 1
  for (int base = first; base < last; base += Format::kUnroll) {
#pragma GCC unroll 32
    for (int i = 0; i < Format::kUnroll; ++i) {
      const int step = base + i;
      const auto* const x = input + step * Format::kStepColumns;
      if constexpr (kTokens == 1) {  // no weights to keep: the registers are full of sums
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          const auto weights = Format::weights(rows.places[v], step, Rows::part(rows, v));
          sums[0][v] = Format::multiply_add(x, weights, sums[0][v]);
        }
        continue;
      }
      typename Format::Weights weights[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        weights[v] = Format::weights(rows.places[v], step, Rows::part(rows, v));
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          sums[t][v] = Format::multiply_add(x + t * kBlockColumns, weights[v], sums[t][v]);
        }
      }
    }
  }
}

VL_SIMD FloatVec as_floats(FloatVec sums) { return sums; }
VL_SIMD FloatVec as_floats(IntLanes sums) { return from_int(sums); }

// A block of integers, or of numbers with scales: its sums, and then what they stand for, are added
// to out.
template <typename Format, int kTokens, int kVecs>
VL_SIMD void multiply_scaled(const typename Format::Element* input, const float* input_scales,
                             const float* block_sums, const TileRows<Format, kVecs>& rows,
                             float* out) {
  using Rows = TileRows<Format, kVecs>;
  constexpr int kParts = Format::kScales > 1 ? Format::kScales : 1;
  constexpr int kPartSteps = Format::kSteps / kParts;
  static_assert(kParts == 1 || !Format::kHasMinimum, "a minimum is added once");
#pragma GCC unroll 2
  for (int i = 0; i < kParts; ++i) {
    typename Format::Sum products[kTokens][kVecs] = {};
    multiply_steps<Format, kTokens, kVecs>(input, i * kPartSteps, (i + 1) * kPartSteps, rows,
                                           products);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      FloatVec scale, minimum;
      if constexpr (Format::kScales > 0) {
        scale = Format::scale(rows.places[v], i, Rows::part(rows, v));
      }
      if constexpr (Format::kHasMinimum) {
        minimum = Format::minimum(rows.places[v], Rows::part(rows, v));
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        float* const to = out + t * kGroupRows + v * kWidth;
        FloatVec product = as_floats(products[t][v]), sum = load(to), last_scale = scale;
        if constexpr (Format::kIsInteger) {
          const FloatVec input_scale = broadcast(input_scales[t]);
          if constexpr (Format::kScales > 0) {
            product = mul(product, input_scale);
          } else {
            last_scale = input_scale;
          }
        }
        sum = fma(product, last_scale, sum);
        if constexpr (Format::kHasMinimum) sum = fma(minimum, broadcast(block_sums[t]), sum);
        store(to, sum);
      }
    }
  }
}

template <typename Format, int kTokens, int kVecs>
__attribute__((noinline)) void multiply_tile(const Pass& pass, int64_t token, int first_vec,
                                             Fetch fetch) {
  using Element = typename Format::Element;
  constexpr bool kInRegisters = !Format::kIsInteger && Format::kScales == 0;  // the sums of a pass
  float* const out = pass.sums + token * kGroupRows + first_vec * kWidth;
  const Element* input = static_cast<const Element*>(pass.input) + token * kBlockColumns;
  TileRows<Format, kVecs> rows;
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) rows.panels[v] = pass.panels[(first_vec + v) / kPanelVecs];
  rows.first_part = kVecs < kPanelVecs ? first_vec % kPanelVecs : 0;
  FloatVec sums[kTokens][kVecs];
  if constexpr (kInRegisters) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sums[t][v] = load(out + t * kGroupRows + v * kWidth);
    }
  }

#pragma GCC unroll 1
  for (int64_t b = 0; b < pass.num_blocks; ++b) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      rows.places[v] = Format::place(rows.panels[v], pass.first_block + b);
    }
    if constexpr (!Format::kIsWidened) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; v += kPanelVecs) {
        fetch_next<Format>(pass, (first_vec + v) / kPanelVecs, b, fetch);
      }
    }
    if constexpr (kInRegisters) {
      multiply_steps<Format, kTokens, kVecs>(input, 0, Format::kSteps, rows, sums);
    } else {
      const int64_t at = b * pass.input_tokens + token;
      const float* const input_scales = Format::kIsInteger ? pass.input_scales + at : nullptr;
      const float* const block_sums = Format::kHasMinimum ? pass.block_sums + at : nullptr;
      multiply_scaled<Format, kTokens, kVecs>(input, input_scales, block_sums, rows, out);
    }
    input += pass.input_tokens * kBlockColumns;
  }

  if constexpr (kInRegisters) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) store(out + t * kGroupRows + v * kWidth, sums[t][v]);
    }
  }
}

template <typename Format, int kTokens>
void multiply_row_of_tiles(const Pass& pass, int64_t token) {
  constexpr int kVecs = tile_vecs(kTokens);
  const Fetch fetch = fetch_of_tiles<Format>(
      token / kMaxTileTokens, (pass.num_tokens + kMaxTileTokens - 1) / kMaxTileTokens, kTokens);
  const int num_vecs = static_cast<int>(pass.num_panels) * kPanelVecs;
  for (int v = 0; v < num_vecs; v += kVecs) {
    multiply_tile<Format, kTokens, kVecs>(pass, token, v, fetch);
  }
}

template <typename Format>
void multiply_tokens(const Pass& pass) {
  constexpr bool kFew = Format::kDirectTokens < kMaxTileTokens;
  int64_t token = 0;
  if constexpr (!kFew) {
    for (; token + kMaxTileTokens <= pass.num_tokens; token += kMaxTileTokens) {
      multiply_row_of_tiles<Format, kMaxTileTokens>(pass, token);
    }
  }
  // The input is padded to an even number of tokens, unless it is one.
  switch (pass.num_tokens - token) {
    case 0:
      return;
    case 1:
      return multiply_row_of_tiles<Format, 1>(pass, token);
    case 2:
      return multiply_row_of_tiles<Format, 2>(pass, token);
    case 3:
    case 4:
      return multiply_row_of_tiles<Format, 4>(pass, token);
    default:
      if constexpr (!kFew) multiply_row_of_tiles<Format, kMaxTileTokens>(pass, token);
  }
}

int64_t padded_tokens(int64_t num_tokens) { return num_tokens == 1 ? 1 : (num_tokens + 1) / 2 * 2; }

// Where a token's block is among the prepared ones: beside the other tokens'.
VL_SIMD int64_t prepared_at(int64_t token, int64_t block, int64_t prepared_tokens, int64_t) {
  return block * prepared_tokens + token;
}

// Products of a format by vectors, a pass of kBlocks blocks at a time.
template <typename Format>
struct VectorProduct {
  static constexpr int64_t kTurnGroups = 1;

  static int64_t most_blocks(int64_t) { return kPassBlocks; }

  static const void* input_at(const LinearCall& call, int64_t token, int64_t block) {
    return static_cast<const typename Format::Element*>(call.prepared) +
           prepared_at(token, block, call.prepared_tokens, 0) * kBlockColumns;
  }

  template <typename Finish>
  static void multiply(const Pass& pass, uint8_t* widened, Finish finish) {
    if (pass.is_first) {
      const int64_t num_sums = padded_tokens(pass.num_tokens) * kGroupRows;
      for (int64_t i = 0; i < num_sums; i += kWidth) store(pass.sums + i, zero());
    }
    add_products(pass, widened);
    if (pass.is_last) finish(0, pass.num_tokens, 0, pass.num_panels, pass.sums);
  }

 private:
  static void add_products(const Pass& pass, uint8_t* widened) {
    if (pass.num_tokens <= Format::kDirectTokens) return multiply_tokens<Format>(pass);
    if constexpr (Format::kDirectTokens < kRangeTokens) {
      using Wide = Widened<Format>;
      static_assert(Wide::kBlockBytes <= kWidenedBlockBytes);
      Pass wide = pass;
      wide.first_block = 0;
      for (int p = 0; p < kGroupPanels; ++p) {
        if (p >= pass.num_panels) {
          wide.panels[p] = wide.panels[p - 1];
          continue;
        }
        uint8_t* const to = widened + p * kPassBlocks * Wide::kBlockBytes;
        for (int64_t b = 0; b < pass.num_blocks; ++b) {
          fetch_next<Format>(pass, p, b, {0, Format::kBlockBytes});
          widen_block<Format>(pass.panels[p], pass.first_block + b, to + b * Wide::kBlockBytes);
        }
        wide.panels[p] = to;
      }
      multiply_tokens<Wide>(wide);
    }
  }
};

// Around a range's products: nothing to set up.
struct ProductScope {
  explicit ProductScope(int64_t) {}
};

}  // namespace
}  // namespace vllm_lite::VL_ISA
