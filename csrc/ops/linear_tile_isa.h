// The inner loops of the packed product with vectors. Only for linear_isa.cpp.
//
// A tile is a few tokens by a few vectors of rows, whose sums stay in registers while the columns
// of a pass go by. Every lane is an output and sees its columns in order, whatever the tile's
// shape: shapes change speed, never a bit.
#pragma once

#include "ops/linear_pass_isa.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int kMaxTileTokens = 6;
constexpr int64_t kPartTokens = 4 * kMaxTileTokens;
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

template <typename Format, int kTokens, int kVecs>
__attribute__((noinline)) void multiply_tile(const Pass& pass, int64_t token, int first_vec,
                                             Fetch fetch) {
  float* const out = pass.sums + token * kGroupRows + first_vec * kWidth;
  FloatVec sums[kTokens][kVecs];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sums[t][v] = load(out + t * kGroupRows + v * kWidth);
  }
  const Element* input = pass.input + token * kBlockColumns;
  const float* block_sums = Format::kHasMinimum ? pass.block_sums + token : nullptr;
  // Fewer vectors than a panel's: all of one panel, but for the part that they begin at.
  const uint8_t* panels[kVecs];
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) panels[v] = pass.panels[(first_vec + v) / kPanelVecs];
  const int first_part = kVecs < kPanelVecs ? first_vec % kPanelVecs : 0;

#pragma GCC unroll 1
  for (int64_t b = 0; b < pass.num_blocks; ++b) {
    Place places[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) places[v] = Format::place(panels[v], pass.first_block + b);
    if constexpr (!Format::kIsWidened) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; v += kPanelVecs) {
        fetch_next<Format>(pass, (first_vec + v) / kPanelVecs, b, fetch);
      }
    }
    const auto part = [&](int v) { return first_part + v % kPanelVecs; };

    // The steps [first, last), added to `to`.
    const auto multiply_steps = [&](int first, int last,
                                    FloatVec(&to)[kTokens][kVecs]) __attribute__((always_inline)) {
#pragma GCC unroll 1
      for (int base = first; base < last; base += Format::kUnroll) {
#pragma GCC unroll 32
        for (int i = 0; i < Format::kUnroll; ++i) {
          const int step = base + i;
          const Element* const x = input + step * kStepColumns;
          if constexpr (kTokens == 1) {  // no weights to keep: the registers are full of sums
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) {
              const Weights weights = Format::weights(places[v], step, part(v));
              to[0][v] = multiply_add(x, weights, to[0][v]);
            }
            continue;
          }
          Weights weights[kVecs];
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) weights[v] = Format::weights(places[v], step, part(v));
#pragma GCC unroll 8
          for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
            for (int v = 0; v < kVecs; ++v) {
              to[t][v] = multiply_add(x + t * kBlockColumns, weights[v], to[t][v]);
            }
          }
        }
      }
    };

    if constexpr (Format::kScales == 0) {
      multiply_steps(0, kSteps, sums);
    } else {
      constexpr int kScaleSteps = kSteps / Format::kScales;
#pragma GCC unroll 2
      for (int i = 0; i < Format::kScales; ++i) {
        FloatVec products[kTokens][kVecs] = {};
        multiply_steps(i * kScaleSteps, (i + 1) * kScaleSteps, products);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          const FloatVec scale = Format::scale(places[v], i, part(v));
#pragma GCC unroll 8
          for (int t = 0; t < kTokens; ++t) sums[t][v] = fma(scale, products[t][v], sums[t][v]);
        }
      }
    }
    if constexpr (Format::kHasMinimum) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        const FloatVec minimum = Format::minimum(places[v], part(v));
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          sums[t][v] = fma(minimum, broadcast(block_sums[t]), sums[t][v]);
        }
      }
    }
    input += pass.input_tokens * kBlockColumns;
    if constexpr (Format::kHasMinimum) block_sums += pass.input_tokens;
  }

#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) store(out + t * kGroupRows + v * kWidth, sums[t][v]);
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

// Products of a format by vectors, a pass of kBlocks blocks at a time.
template <typename Format>
struct VectorProduct {
  static constexpr int64_t kBlocks = kPassBlocks;

  static void multiply(const Pass& pass, uint8_t* widened) {
    if (pass.num_tokens <= Format::kDirectTokens) return multiply_tokens<Format>(pass);
    if constexpr (Format::kDirectTokens < kRangeTokens) {
      using Wide = WidenedOf<Format>;
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

int64_t padded_tokens(int64_t num_tokens) { return num_tokens == 1 ? 1 : (num_tokens + 1) / 2 * 2; }

// Around a range's products: nothing to set up.
struct ProductScope {
  explicit ProductScope(int64_t) {}
};

}  // namespace
}  // namespace vllm_lite::VL_ISA
