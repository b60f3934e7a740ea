// How a packed weight lies in memory, for packing and for the kernels of every instruction set.
//
// A weight is panels of kPanelRows rows, a panel its blocks of kBlockColumns columns in order. What
// a block holds, [..][row] always meaning the panel's 16 rows side by side (a vector's lanes):
//
//   float32            [32 columns][row]
//   bfloat16, float16  [16 pairs][row][2]: pairs of columns, the order of vdpbf16ps and of AMX
//   int8               [16 pairs][row][2]; the panel begins with float32 scales [row]
//   Q8_0               float16 scale [row], then as int8
//   Q4_0               float16 scale [row], nibbles
//   Q4_1               float16 scale [row], float16 minimum [row], nibbles
//   Q4_K, Q5_K         uint8 scale [row], uint8 minimum [row], (Q5_K: high bits,) nibbles
//   Q6_K               int8 scale [2][row], high bits, nibbles
//
// nibbles: [4][row] words of 32 bits for 8 columns each; nibble j of a word's lower half is column
// 2j, of its upper half column 2j + 1. So a shift by 4j brings a pair into the low bits of both
// halves. Q4_0's have their highest bit turned, which makes them integers from -8 on. high bits:
// likewise, words [row] with one bit for each of 32 columns (Q5_K), or [2][row] with two for each
// of 16 (Q6_K). The K formats' eight blocks of 256 columns are preceded by the float16 factors that
// their scales and minima have in common: d [row], and dmin [row] unless Q6_K. The sizes are the
// file's but for Q4_K (+2.8 %) and Q5_K (+2.3 %), whose scales take 8 bits.
#pragma once

#include <cstdint>

#include "ops/linear.h"

// Forced inline: no symbol that the objects of two instruction sets could share (core/isa.h).
#define VL_LAYOUT constexpr __attribute__((always_inline))

namespace vllm_lite {

constexpr int kBlockColumns = 32;
constexpr int kLanes = static_cast<int>(kPanelRows);
constexpr int kNibbleBytes = kBlockColumns / 2 * kLanes;

struct PanelLayout {
  int panel_header;      // bytes before a panel's first block
  int blocks_per_super;  // blocks that share a header
  int super_header;      // bytes of it
  int block_scales;      // bytes of scales and minima at a block's beginning
  int block_quants;      // bytes after them

  VL_LAYOUT int64_t block_bytes() const { return block_scales + block_quants; }
  VL_LAYOUT int64_t super_bytes() const { return super_header + blocks_per_super * block_bytes(); }
  // Where `block` of a panel begins, and the header that it shares.
  VL_LAYOUT int64_t super_offset(int64_t block) const {
    return panel_header + block / blocks_per_super * super_bytes();
  }
  VL_LAYOUT int64_t block_offset(int64_t block) const {
    return super_offset(block) + super_header + block % blocks_per_super * block_bytes();
  }
};

VL_LAYOUT PanelLayout panel_layout(WeightFormat format) {
  constexpr int kHalves = kLanes * 2;  // a float16 per row
  switch (format) {
    case WeightFormat::kFloat32:
      return {0, 1, 0, 0, kBlockColumns * kLanes * 4};
    case WeightFormat::kBFloat16:
    case WeightFormat::kFloat16:
      return {0, 1, 0, 0, kBlockColumns * kLanes * 2};
    case WeightFormat::kInt8:
      return {kLanes * 4, 1, 0, 0, kBlockColumns * kLanes};
    case WeightFormat::kQ4_0:
      return {0, 1, 0, kHalves, kNibbleBytes};
    case WeightFormat::kQ4_1:
      return {0, 1, 0, 2 * kHalves, kNibbleBytes};
    case WeightFormat::kQ8_0:
      return {0, 1, 0, kHalves, kBlockColumns * kLanes};
    case WeightFormat::kQ4_K:
      return {0, 8, 2 * kHalves, 2 * kLanes, kNibbleBytes};
    case WeightFormat::kQ5_K:
      return {0, 8, 2 * kHalves, 2 * kLanes, kBlockColumns / 8 * kLanes + kNibbleBytes};
    case WeightFormat::kQ6_K:
      return {0, 8, kHalves, 2 * kLanes, kBlockColumns / 4 * kLanes + kNibbleBytes};
  }
  return {};
}

// Whether the weight is integers, which are multiplied as such.
VL_LAYOUT bool is_quantised(WeightFormat format) {
  return format != WeightFormat::kFloat32 && format != WeightFormat::kBFloat16 &&
         format != WeightFormat::kFloat16;
}

// Whether out has a part that is the block's sum of the input times a minimum.
VL_LAYOUT bool has_minimum(WeightFormat format) {
  return format == WeightFormat::kQ4_1 || format == WeightFormat::kQ4_K ||
         format == WeightFormat::kQ5_K;
}

VL_LAYOUT int64_t num_column_blocks(int64_t columns) {
  return (columns + kBlockColumns - 1) / kBlockColumns;
}
VL_LAYOUT int64_t num_panels(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }
VL_LAYOUT int64_t panel_bytes(WeightFormat format, int64_t columns) {
  const PanelLayout layout = panel_layout(format);
  return layout.panel_header +
         num_column_blocks(columns) / layout.blocks_per_super * layout.super_bytes();
}

}  // namespace vllm_lite

#undef VL_LAYOUT
