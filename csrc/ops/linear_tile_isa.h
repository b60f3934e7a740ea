// The inner loops of the packed product with vectors. Only for linear_isa.cpp.
//
// A tile is a few tokens by a few vectors of rows, whose sums stay in registers while the columns
// of a pass go by. Every lane is an output and sees its columns in order, whatever the tile's
// shape: shapes change speed, never a bit.
#pragma once

#include "ops/linear_formats_isa.h"
#include "ops/linear_kernels.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int kMaxTileTokens = 6;
// Up to so many tokens weights are widened in registers as they come; more share a widened copy.
constexpr int64_t kDirectTokens = 4;

// Vectors of rows beside each other: enough sums to hide the latency of the multiply-add, few
// enough for 32 (AVX-512) or 16 registers.
constexpr int tile_vecs(int tokens) {
  if (kWidth == 16) return kGroupPanels;
  return tokens == 1 ? 8 : tokens == 2 ? 4 : 2;
}

// A pass over some blocks of columns of one group of panels.
struct Pass {
  float* sums;              // [tokens][kGroupRows], added to
  const Element* input;     // [block][tokens][kBlockColumns]
  const float* block_sums;  // [block][tokens]
  int64_t input_tokens;     // tokens between blocks
  const uint8_t* panels[kGroupPanels];
  int64_t num_panels;               // of the group; the panels after them are the last one again
  int64_t first_block, num_blocks;  // in the panels; `input` begins with the first
  int64_t num_tokens;
};

template <typename Format, int kTokens, int kVecs>
__attribute__((noinline)) void multiply_tile(const Pass& pass, int64_t token, int first_vec) {
  float* const out = pass.sums + token * kGroupRows + first_vec * kWidth;
  FloatVec sums[kTokens][kVecs];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sums[t][v] = load(out + t * kGroupRows + v * kWidth);
  }
  const Element* input = pass.input + token * kBlockColumns;
  const float* block_sums = pass.block_sums + token;
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
    const auto part = [&](int v) { return first_part + v % kPanelVecs; };

    // The steps [first, last), added to `to`.
    const auto multiply_steps = [&](int first, int last,
                                    FloatVec(&to)[kTokens][kVecs]) __attribute__((always_inline)) {
#pragma GCC unroll 1
      for (int base = first; base < last; base += Format::kUnroll) {
#pragma GCC unroll 32
        for (int i = 0; i < Format::kUnroll; ++i) {
          const int step = base + i;
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) {
            const Weights weights = Format::weights(places[v], step, part(v));
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) {
              to[t][v] =
                  multiply_add(input + t * kBlockColumns + step * kStepColumns, weights, to[t][v]);
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
    block_sums += pass.input_tokens;
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
  const int num_vecs = static_cast<int>(pass.num_panels) * kPanelVecs;
  for (int v = 0; v < num_vecs; v += kVecs) multiply_tile<Format, kTokens, kVecs>(pass, token, v);
}

// kFew: at most kDirectTokens of them.
template <typename Format, bool kFew>
void multiply_tokens(const Pass& pass) {
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

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

// Products of a format by vectors, a pass of kBlocks blocks at a time.
template <typename Format>
struct VectorProduct {
  static constexpr int64_t kBlocks = kPassBlocks;
#if defined(VL_ISA_avx512_bf16)
  static constexpr bool kIsWide = kSame<Format, DenseBFloat16>;
#else
  static constexpr bool kIsWide = kSame<Format, DenseFloat32>;
#endif

  static void multiply(const Pass& pass, uint8_t* widened) {
    if constexpr (kIsWide) {
      return multiply_tokens<Format, false>(pass);
    } else {
      if (pass.num_tokens <= kDirectTokens) return multiply_tokens<Format, true>(pass);
      using Wide = WidenedOf<Format>;
      static_assert(Wide::kBlockBytes <= kWidenedBlockBytes);
      Pass wide = pass;
      wide.first_block = 0;
      for (int64_t p = 0; p < kGroupPanels; ++p) {
        wide.panels[p] = widened + p * kPassBlocks * Wide::kBlockBytes;
        if (p >= pass.num_panels) {
          wide.panels[p] = wide.panels[p - 1];
          continue;
        }
        for (int64_t b = 0; b < pass.num_blocks; ++b) {
          widen_block<Format>(pass.panels[p], pass.first_block + b,
                              widened + (p * kPassBlocks + b) * Wide::kBlockBytes);
        }
      }
      multiply_tokens<Wide, false>(wide);
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
