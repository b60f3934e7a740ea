// Rows of a packed weight (linear_layout.h), widened.
#include <vector>

#include "core/element.h"
#include "core/parallel_for.h"
#include "ops/linear.h"
#include "ops/linear_layout.h"
#include "ops/ops.h"

namespace vllm_lite {
namespace {

using namespace element;

constexpr int64_t kTokensPerTask = 4;

// A row of a panel: element i of [..][row] at an offset.
struct Lane {
  const uint8_t* panel;
  int lane;

  template <typename T>
  T get(int64_t offset, int64_t i) const {
    T value;
    std::memcpy(&value, panel + offset + (i * kLanes + lane) * static_cast<int64_t>(sizeof(T)),
                sizeof(T));
    return value;
  }
  float get_half(int64_t offset, int64_t i) const { return to_float(get<_Float16>(offset, i)); }
  uint32_t get_bits(int64_t offset, int64_t word, int shift, uint32_t mask) const {
    return get<uint32_t>(offset, word) >> shift & mask;
  }
};

// Column c of block b.
float element_of(WeightFormat format, const Lane& row, int64_t b, int c) {
  const PanelLayout layout = panel_layout(format);
  const int64_t shared = layout.super_offset(b), at = layout.block_offset(b);
  const int64_t quants = at + layout.block_scales;
  const int pair = c / 2, half = c % 2 * 16;
  const auto nibble = [&](int64_t offset) {
    return row.get_bits(offset, pair / 4, pair % 4 * 4 + half, 15);
  };
  const auto byte = [&](int64_t offset) {
    return static_cast<int8_t>(row.get<uint16_t>(offset, pair) >> c % 2 * 8);
  };
  switch (format) {
    case WeightFormat::kFloat32:
      return row.get<float>(at, c);
    case WeightFormat::kBFloat16:
      return to_float(BFloat16{static_cast<uint16_t>(row.get_bits(at, pair, half, 0xffff))});
    case WeightFormat::kFloat16: {
      const auto bits = static_cast<uint16_t>(row.get_bits(at, pair, half, 0xffff));
      _Float16 value;
      std::memcpy(&value, &bits, sizeof(value));
      return to_float(value);
    }
    case WeightFormat::kInt8:
      return row.get<float>(0, 0) * static_cast<float>(byte(at));
    case WeightFormat::kQ8_0:
      return row.get_half(at, 0) * static_cast<float>(byte(quants));
    case WeightFormat::kQ4_0:
      return row.get_half(at, 0) * (static_cast<float>(nibble(quants) ^ 8) - 8);
    case WeightFormat::kQ4_1:
      return row.get_half(at, 0) * static_cast<float>(nibble(quants)) + row.get_half(at, 1);
    case WeightFormat::kQ4_K:
    case WeightFormat::kQ5_K: {
      const bool has_high = format == WeightFormat::kQ5_K;
      const uint32_t high = has_high ? row.get_bits(quants, 0, pair + half, 1) : 0;
      const uint32_t number = nibble(quants + (has_high ? kLanes * 4 : 0)) | high << 4;
      return row.get_half(shared, 0) * row.get<uint8_t>(at, 0) * static_cast<float>(number) -
             row.get_half(shared, 1) * row.get<uint8_t>(at, 1);
    }
    case WeightFormat::kQ6_K: {
      const uint32_t high = row.get_bits(quants, pair / 8, pair % 8 * 2 + half, 3);
      const uint32_t number = nibble(quants + 2 * kLanes * 4) | high << 4;
      return row.get_half(shared, 0) * row.get<int8_t>(at, c / 16) *
             (static_cast<float>(number) - 32);
    }
  }
  return 0;
}

}  // namespace

void packed_embedding_cpu(const PackedEmbeddingParams& p) {
  check_token_ids(p.token_ids, p.num_tokens, p.last_tokens, p.max_rows, p.rows);
  const int64_t bytes = panel_bytes(p.format, p.columns);
  dispatch_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(p.num_tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t token = p.token_ids[i] >= 0 ? p.token_ids[i] : p.last_tokens[~p.token_ids[i]];
        const Lane row{static_cast<const uint8_t*>(p.packed) + token / kPanelRows * bytes,
                       static_cast<int>(token % kPanelRows)};
        T* out = static_cast<T*>(p.out) + i * p.out_stride;
        for (int64_t c = 0; c < p.columns; ++c) {
          from_float(
              element_of(p.format, row, c / kBlockColumns, static_cast<int>(c % kBlockColumns)),
              out[c]);
        }
      }
    });
  });
}

}  // namespace vllm_lite
