// From rows as a checkpoint has them to panels (linear_layout.h).
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/parallel_for.h"
#include "ops/linear.h"
#include "ops/linear_layout.h"

namespace vllm_lite {
namespace {

const char* format_name(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
      return "float32";
    case WeightFormat::kBFloat16:
      return "bfloat16";
    case WeightFormat::kFloat16:
      return "float16";
    case WeightFormat::kInt8:
      return "int8";
    case WeightFormat::kQ4_0:
      return "Q4_0";
    case WeightFormat::kQ4_1:
      return "Q4_1";
    case WeightFormat::kQ8_0:
      return "Q8_0";
    case WeightFormat::kQ4_K:
      return "Q4_K";
    case WeightFormat::kQ5_K:
      return "Q5_K";
    case WeightFormat::kQ6_K:
      return "Q6_K";
  }
  throw Error("weight format " + std::to_string(static_cast<int32_t>(format)) + " is unknown");
}

// What the file has: elements and bytes of a block.
struct SourceBlock {
  int64_t columns, bytes;
};
SourceBlock source_block(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFloat32:
      return {1, 4};
    case WeightFormat::kBFloat16:
    case WeightFormat::kFloat16:
      return {1, 2};
    case WeightFormat::kInt8:
      return {1, 1};
    case WeightFormat::kQ4_0:
      return {32, 18};
    case WeightFormat::kQ4_1:
      return {32, 20};
    case WeightFormat::kQ8_0:
      return {32, 34};
    case WeightFormat::kQ4_K:
      return {256, 144};
    case WeightFormat::kQ5_K:
      return {256, 176};
    case WeightFormat::kQ6_K:
      return {256, 210};
  }
  throw Error("weight format " + std::to_string(static_cast<int32_t>(format)) + " is unknown");
}

void check_columns(WeightFormat format, int64_t columns) {
  const std::string name = format_name(format);  // throws if it is unknown
  const int64_t block = source_block(format).columns;
  VL_CHECK(columns >= 1 && columns % block == 0,
           "a packed weight's columns are " + std::to_string(columns) + "; " + name +
               " needs a positive multiple of " + std::to_string(block));
}

// ---- one row into its lane of a panel

// A panel's row. `lane` picks among the 16 elements that stand side by side.
struct Lane {
  uint8_t* panel;
  int lane;

  // Element `row` of [..][row] at `offset`.
  template <typename T>
  void put(int64_t offset, int64_t row, T value) const {
    std::memcpy(panel + offset + (row * kLanes + lane) * static_cast<int64_t>(sizeof(T)), &value,
                sizeof(T));
  }
};

// Columns one by one, `bytes` in all, as elements T, and zeros after them to the block's end. T may
// be a pair of columns: the first is in its lower half.
template <typename T>
void pack_columns(const Lane& to, int64_t offset, const uint8_t* from, int64_t bytes,
                  int64_t padded_bytes) {
  constexpr int64_t kSize = sizeof(T);
  for (int64_t i = 0; i < padded_bytes / kSize; ++i) {
    T value{};
    if (i * kSize < bytes) {
      std::memcpy(&value, from + i * kSize, std::min<size_t>(kSize, bytes - i * kSize));
    }
    to.put(offset, i, value);
  }
}

// The number of column c: its low 4 bits and, of Q5_K and Q6_K, what is above.
void pack_numbers(const Lane& to, int64_t offset, const uint8_t (&numbers)[kBlockColumns],
                  int high_bits) {
  uint32_t high[2] = {}, low[4] = {};
  for (int c = 0; c < kBlockColumns; ++c) {
    const int pair = c / 2, half = c % 2 * 16;
    low[pair / 4] |= (numbers[c] & 15u) << (pair % 4 * 4 + half);
    if (high_bits == 1) high[0] |= (numbers[c] >> 4 & 1u) << (pair + half);
    if (high_bits == 2) high[pair / 8] |= (numbers[c] >> 4 & 3u) << (pair % 8 * 2 + half);
  }
  for (int i = 0; i < high_bits; ++i) to.put(offset, i, high[i]);
  for (int i = 0; i < 4; ++i) to.put(offset, high_bits + i, low[i]);
}

uint16_t half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof(half));
  return half;
}

// GGUF's nibbles: first the lower ones of all bytes, then the upper.
void split_nibbles(const uint8_t* bytes, uint8_t (&numbers)[kBlockColumns]) {
  for (int i = 0; i < 16; ++i) {
    numbers[i] = bytes[i] & 15;
    numbers[i + 16] = bytes[i] >> 4;
  }
}

// A source block of 32 columns, packed as block `b` of the panel.
void pack_small_block(WeightFormat format, const Lane& to, int64_t b, const uint8_t* from) {
  const PanelLayout layout = panel_layout(format);
  const int64_t at = layout.block_offset(b);
  to.put(at, 0, half_at(from));
  if (format == WeightFormat::kQ8_0) {
    pack_columns<uint16_t>(to, at + layout.block_scales, from + 2, kBlockColumns, kBlockColumns);
    return;
  }
  uint8_t numbers[kBlockColumns];
  if (format == WeightFormat::kQ4_1) {
    to.put(at, 1, half_at(from + 2));
    split_nibbles(from + 4, numbers);
  } else {
    split_nibbles(from + 2, numbers);
    for (uint8_t& number : numbers) number ^= 8;
  }
  pack_numbers(to, at + layout.block_scales, numbers, 0);
}

// The eight 6-bit scales and minima of Q4_K and Q5_K in 12 bytes: four of each in the low bits of
// the first eight bytes, the low nibbles of the others in the last four, and their two high bits
// above the first ones.
struct ScaleMinimum {
  uint8_t scale, minimum;
};
ScaleMinimum scale_minimum(const uint8_t* packed, int i) {
  const int low = i & 3;
  const uint8_t a = packed[low], b = packed[low + 4], c = packed[low + 8];
  if (i < 4) return {static_cast<uint8_t>(a & 63), static_cast<uint8_t>(b & 63)};
  return {static_cast<uint8_t>((c & 15) | (a >> 2 & 48)),
          static_cast<uint8_t>(c >> 4 | (b >> 2 & 48))};
}

// A source block of 256 columns of Q4_K or Q5_K, packed as blocks b to b + 7.
void pack_block_with_minima(WeightFormat format, const Lane& to, int64_t b, const uint8_t* from) {
  const PanelLayout layout = panel_layout(format);
  const bool has_high = format == WeightFormat::kQ5_K;
  const uint8_t* high = from + 16;
  const uint8_t* quants = from + (has_high ? 48 : 16);
  to.put(layout.super_offset(b), 0, half_at(from));
  to.put(layout.super_offset(b), 1, half_at(from + 2));
  for (int group = 0; group < 8; ++group) {
    const int64_t at = layout.block_offset(b + group);
    const ScaleMinimum s = scale_minimum(from + 4, group);
    to.put(at, 0, s.scale);
    to.put(at, 1, s.minimum);
    uint8_t numbers[kBlockColumns];
    for (int i = 0; i < kBlockColumns; ++i) {
      const int low = quants[group / 2 * 32 + i] >> (group % 2 * 4) & 15;
      const int fifth = has_high ? high[i] >> group & 1 : 0;
      numbers[i] = static_cast<uint8_t>(low | fifth << 4);
    }
    pack_numbers(to, at + layout.block_scales, numbers, has_high ? 1 : 0);
  }
}

// Likewise of Q6_K: a half of 128 columns is four groups of 32, the low nibbles of 64 bytes, then
// their high ones; the two bits above in 32 bytes, a pair of bits per group.
void pack_q6_k(const Lane& to, int64_t b, const uint8_t* from) {
  const PanelLayout layout = panel_layout(WeightFormat::kQ6_K);
  const uint8_t* scales = from + 192;
  to.put(layout.super_offset(b), 0, half_at(from + 208));
  for (int group = 0; group < 8; ++group) {
    const int64_t at = layout.block_offset(b + group);
    to.put(at, 0, scales[group * 2]);
    to.put(at, 1, scales[group * 2 + 1]);
    const int part = group / 4, in_part = group % 4;
    const uint8_t* low = from + part * 64 + in_part % 2 * 32;
    const uint8_t* high = from + 128 + part * 32;
    uint8_t numbers[kBlockColumns];
    for (int i = 0; i < kBlockColumns; ++i) {
      const int nibble = low[i] >> (in_part / 2 * 4) & 15;
      numbers[i] = static_cast<uint8_t>(nibble | (high[i] >> (in_part * 2) & 3) << 4);
    }
    pack_numbers(to, at + layout.block_scales, numbers, 2);
  }
}

void pack_row(WeightFormat format, const Lane& to, const uint8_t* from, int64_t columns,
              const float* scale) {
  const SourceBlock source = source_block(format);
  const int64_t padded = num_column_blocks(columns) * kBlockColumns;
  switch (format) {
    case WeightFormat::kFloat32:
      return pack_columns<uint32_t>(to, 0, from, columns * 4, padded * 4);
    case WeightFormat::kBFloat16:
    case WeightFormat::kFloat16:
      return pack_columns<uint32_t>(to, 0, from, columns * 2, padded * 2);
    case WeightFormat::kInt8:
      to.put(0, 0, *scale);
      return pack_columns<uint16_t>(to, panel_layout(format).panel_header, from, columns, padded);
    default:
      break;
  }
  const int64_t blocks_each = source.columns / kBlockColumns;
  for (int64_t b = 0; b < num_column_blocks(columns); b += blocks_each, from += source.bytes) {
    switch (format) {
      case WeightFormat::kQ4_K:
      case WeightFormat::kQ5_K:
        pack_block_with_minima(format, to, b, from);
        break;
      case WeightFormat::kQ6_K:
        pack_q6_k(to, b, from);
        break;
      default:
        pack_small_block(format, to, b, from);
    }
  }
}

void check_params(const PackWeightParams& p) {
  packed_weight_bytes(p.format, p.rows, p.columns);
  VL_CHECK(p.first_row >= 0 && p.num_rows >= 0 && p.num_rows <= p.rows - p.first_row,
           "pack_weight: rows " + std::to_string(p.first_row) + " to " +
               std::to_string(p.first_row + p.num_rows) + " are not within the weight's " +
               std::to_string(p.rows));
  VL_CHECK((p.format == WeightFormat::kInt8) == (p.scales != nullptr),
           std::string("pack_weight: scales go with int8 and it alone; the format is ") +
               format_name(p.format));
}

}  // namespace

int64_t packed_weight_bytes(WeightFormat format, int64_t rows, int64_t columns) {
  check_columns(format, columns);
  VL_CHECK(rows >= 1,
           "a packed weight's rows are " + std::to_string(rows) + ", must be at least 1");
  return num_panels(rows) * panel_bytes(format, columns);
}

int64_t source_row_bytes(WeightFormat format, int64_t columns) {
  check_columns(format, columns);
  const SourceBlock block = source_block(format);
  return columns / block.columns * block.bytes;
}

void pack_weight_cpu(const PackWeightParams& params) {
  check_params(params);
  if (params.num_rows == 0) return;
  constexpr int64_t kTaskBytes = 256 << 10;
  const int64_t row_bytes = source_row_bytes(params.format, params.columns);
  const int64_t bytes = panel_bytes(params.format, params.columns);
  // The rows that fill the last panel up are zeros, and packed with the weight's last row.
  const std::vector<uint8_t> zeros(static_cast<size_t>(row_bytes));
  const float zero_scale = 0.0f;
  const int64_t source_end = params.first_row + params.num_rows;
  const int64_t last_row =
      source_end == params.rows ? num_panels(params.rows) * kPanelRows : source_end;

  const auto pack = [&](int64_t row) {
    const Lane to{static_cast<uint8_t*>(params.packed) + row / kPanelRows * bytes,
                  static_cast<int>(row % kPanelRows)};
    if (row >= params.rows) {
      return pack_row(params.format, to, zeros.data(), params.columns, &zero_scale);
    }
    const int64_t i = row - params.first_row;
    pack_row(params.format, to, static_cast<const uint8_t*>(params.source) + i * row_bytes,
             params.columns, params.scales ? params.scales + i : nullptr);
  };
  const int64_t first_panel = params.first_row / kPanelRows;
  parallel_for(num_panels(last_row) - first_panel, std::max<int64_t>(1, kTaskBytes / bytes),
               [&](int64_t begin, int64_t end) {
                 const int64_t first =
                     std::max(params.first_row, (first_panel + begin) * kPanelRows);
                 const int64_t last = std::min(last_row, (first_panel + end) * kPanelRows);
                 for (int64_t row = first; row < last; ++row) pack(row);
               });
}

}  // namespace vllm_lite
