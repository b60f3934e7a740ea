// The packed product of one instruction set: its input's preparation, and a thread's range of
// panels and tokens. What each set computes with is in linear_tile_isa.h and linear_amx_isa.h.
#include "core/simd.h"
#include "ops/linear_kernels.h"
#include "ops/silu_isa.h"
#if defined(VL_ISA_amx)
#include "ops/linear_amx_isa.h"
#else
#include "ops/linear_tile_isa.h"
#endif

namespace vllm_lite::VL_ISA {
namespace {

// ---- input

using Element = RealArithmetic::Element;

VL_SIMD void convert_block(const Element* from, Element* to) {
  __builtin_memcpy(to, from, kBlockColumns * sizeof(Element));
}
template <typename T>
VL_SIMD void convert_block(const T* from, Element* to) {
  for (int i = 0; i < kBlockColumns; i += kWidth) store(to + i, load(from + i));
}

// Calls prepare(from, at) with every token's blocks and where they belong; what is after the last
// column and the last token is zeros.
template <typename T, typename Prepare>
VL_SIMD void for_each_block(const LinearInput& p, int64_t first, int64_t last, Prepare prepare) {
  const int64_t num_blocks = num_column_blocks(p.columns);
  for (int64_t token = first; token < last; ++token) {
    const T* from = static_cast<const T*>(p.input) + token * p.input_stride;
    for (int64_t block = 0; block < num_blocks; ++block, from += kBlockColumns) {
      const int64_t at = prepared_at(token, block, p.prepared_tokens, num_blocks);
      const int64_t columns = token < p.num_tokens ? p.columns - block * kBlockColumns : 0;
      if (columns >= kBlockColumns) {
        prepare(from, at);
        continue;
      }
      T padded[kBlockColumns] = {};
      for (int i = 0; i < columns; ++i) padded[i] = from[i];
      prepare(padded, at);
    }
  }
}

// The sum of a block, where the format has minima.
template <typename T>
VL_SIMD void sum_block(const LinearInput& p, const T* from, int64_t at) {
  if (p.block_sums == nullptr) return;
  FloatVec sum = zero();
  for (int i = 0; i < kBlockColumns; i += kWidth) sum = add(sum, load(from + i));
  p.block_sums[at] = reduce_add(sum);
}

template <typename T>
void prepare_tokens(const LinearInput& p, int64_t first, int64_t last) {
  for_each_block<T>(p, first, last, [&](const T* from, int64_t at) {
    convert_block(from, static_cast<Element*>(p.prepared) + at * kBlockColumns);
    sum_block(p, from, at);
  });
}

template <typename T>
void quantise_tokens(const LinearInput& p, int64_t first, int64_t last) {
  for_each_block<T>(p, first, last, [&](const T* from, int64_t at) {
    int16_t* const to = static_cast<int16_t*>(p.prepared) + at * kBlockColumns;
    const Quantisation quantisation = quantisation_of(from, kBlockColumns, 32767);
    for (int i = 0; i < kBlockColumns; i += kWidth) {
      store_int(to + i, quantise(load(from + i), quantisation));
    }
    p.scales[at] = quantisation.scale;
    sum_block(p, from, at);
  });
}

void prepare(const LinearInput& p, int64_t first, int64_t last) {
  if (p.scales != nullptr) {
    return p.dtype == DType::kFloat16 ? quantise_tokens<Float16>(p, first, last)
                                      : quantise_tokens<BFloat16>(p, first, last);
  }
#if !defined(VL_ISA_avx512_bf16)
  if (p.dtype == DType::kFloat32) return prepare_tokens<float>(p, first, last);
  if (p.dtype == DType::kFloat16) return prepare_tokens<Float16>(p, first, last);
#endif
  prepare_tokens<BFloat16>(p, first, last);
}

// ---- output

// A vector of sums of rows of one panel, from `row` of it on: its scales, and the bias.
template <typename T, bool kWhole = true>
VL_SIMD FloatVec finish_sum(const LinearCall& call, const float* sums, const uint8_t* panel,
                            int64_t row, const T* bias, int count = kWidth) {
  FloatVec sum = load(sums);
  if (call.format == WeightFormat::kInt8) {
    sum = mul(sum, load(reinterpret_cast<const float*>(panel) + row));
  }
  if (bias != nullptr) sum = add(sum, kWhole ? load(bias) : load_partial(bias, count));
  return sum;
}

// Some tokens' sums of some panels of a group, from `panel` on: the rows' scales, the bias, out's
// dtype.
template <typename T>
void finish_plain(const LinearCall& call, const Group& group, int64_t first_token,
                  int64_t num_tokens, int64_t panel, int64_t num_panels, const float* sums) {
  const int64_t first_row = group.first_row + panel * kPanelRows;
  const int64_t panel_rows = num_panels * kPanelRows, rows_left = call.rows - first_row;
  const int64_t num_rows = panel_rows < rows_left ? panel_rows : rows_left;
  const T* bias = call.bias ? static_cast<const T*>(call.bias) + first_row : nullptr;
  for (int64_t token = 0; token < num_tokens; ++token, sums += kGroupRows) {
    T* out = static_cast<T*>(call.out) + (first_token + token) * call.out_stride + first_row;
    for (int64_t row = 0; row < num_rows; row += kWidth) {
      const uint8_t* const of_row = group.panels[panel + row / kPanelRows];
      const T* row_bias = bias ? bias + row : nullptr;
      if (row + kWidth <= num_rows) {
        store(out + row, finish_sum(call, sums + row, of_row, row % kPanelRows, row_bias));
      } else {
        const auto count = static_cast<int>(num_rows - row);
        store_partial(
            out + row,
            finish_sum<T, false>(call, sums + row, of_row, row % kPanelRows, row_bias, count),
            count);
      }
    }
  }
}

// Likewise of pairs of panels.
template <typename T>
void finish_gated(const LinearCall& call, const Group& group, int64_t first_token,
                  int64_t num_tokens, int64_t first_panel, int64_t num_panels, const float* sums) {
  for (int64_t panel = first_panel; panel < first_panel + num_panels; panel += 2) {
    const float* gate_sums = sums + (panel - first_panel) * kPanelRows;
    const int64_t first_row = group.first_row + panel / 2 * kPanelRows;
    const T* bias = call.bias ? static_cast<const T*>(call.bias) + first_row : nullptr;
    for (int64_t token = 0; token < num_tokens; ++token, gate_sums += kGroupRows) {
      T* out = static_cast<T*>(call.out) + (first_token + token) * call.out_stride + first_row;
      for (int64_t row = 0; row < kPanelRows; row += kWidth) {
        const FloatVec gate = finish_sum(call, gate_sums + row, group.panels[panel], row,
                                         bias ? bias + row : nullptr);
        const FloatVec up = finish_sum(call, gate_sums + kPanelRows + row, group.panels[panel + 1],
                                       row, bias ? bias + call.rows + row : nullptr);
        store(out + row, silu_mul_as<T>(gate, up));
      }
    }
  }
}

template <typename T, typename... Args>
void finish(const LinearCall& call, const Args&... args) {
  call.is_gated ? finish_gated<T>(call, args...) : finish_plain<T>(call, args...);
}

// ---- a range

VL_SIMD int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Blocks [first, last) of a group; `next`, from `next_block` on, is what comes after them.
template <typename Product>
void multiply_group(const LinearCall& call, const LinearRange& range, const Group& group,
                    int64_t first, int64_t last, const Group& next, int64_t next_block,
                    float* sums) {
  Pass pass{};
  pass.call = &call;
  pass.group = &group;
  pass.first_token = range.first_token;
  pass.num_tokens = range.num_tokens;
  pass.sums = sums;
  pass.input_tokens = call.prepared_tokens;
  pass.num_panels = group.num_panels;
  pass.first_block = first;
  pass.num_blocks = last - first;
  pass.is_first = first == 0;
  pass.is_last = last == num_column_blocks(call.columns);
  const PanelLayout layout = panel_layout(call.format);
  for (int64_t p = 0; p < kGroupPanels; ++p) {
    pass.panels[p] = group.panels[p];
    pass.next[p] = next.panels[p] + layout.super_offset(next_block);
  }
  const int64_t at = first * call.prepared_tokens + range.first_token;
  pass.input = Product::input_at(call, range.first_token, first);
  pass.input_scales = call.input_scales ? call.input_scales + at : nullptr;
  pass.block_sums = call.block_sums ? call.block_sums + at : nullptr;
  const auto finish_tokens = [&](int64_t token, int64_t num_tokens, int64_t panel,
                                 int64_t num_panels, const float* from) {
    token += range.first_token;
    switch (call.out_dtype) {
      case DType::kFloat32:
        return finish<float>(call, group, token, num_tokens, panel, num_panels, from);
      case DType::kBFloat16:
        return finish<BFloat16>(call, group, token, num_tokens, panel, num_panels, from);
      case DType::kFloat16:
        return finish<Float16>(call, group, token, num_tokens, panel, num_panels, from);
    }
  };
  Product::multiply(pass, range.widened, finish_tokens);
}

// Some groups take turns: each does a pass, then each the next. Passes are equal, eight blocks
// where columns come by 256, and fetch what comes after them.
template <typename Product>
void multiply_range(const LinearCall& call, const LinearRange& range) {
  const ProductScope scope(range.num_tokens);
  const int64_t num_blocks = num_column_blocks(call.columns);
  const int64_t most_blocks = Product::most_blocks(range.num_tokens);
  const int64_t num_passes = (num_blocks + most_blocks - 1) / most_blocks;
  const int64_t pass_blocks = (num_blocks + num_passes - 1) / num_passes;
  const int64_t stride = panel_bytes(call.format, call.columns);
  const int64_t up_bytes = num_panels(call.rows) * stride;
  const int64_t step = call.is_gated ? kGroupPanels / 2 : kGroupPanels;
  const int64_t turn_panels = num_passes == 1 ? step : Product::kTurnGroups * step;
  const int64_t end = range.first_panel + range.num_panels;
  // That of panels [first, first + count), or as many of them as it holds.
  const auto group_at = [&](int64_t first, int64_t count) {
    Group group;
    group.first_row = first * kPanelRows;
    group.num_panels = least(call.is_gated ? 2 * count : count, kGroupPanels);
    for (int64_t i = 0; i < kGroupPanels; ++i) {
      const int64_t p = least(i, group.num_panels - 1);
      const int64_t at = call.is_gated ? p / 2 * stride + p % 2 * up_bytes : p * stride;
      group.panels[i] = static_cast<const uint8_t*>(call.packed) + first * stride + at;
    }
    return group;
  };
  for (int64_t turn = range.first_panel; turn < end; turn += turn_panels) {
    const int64_t turn_end = least(turn + turn_panels, end);
    Group groups[Product::kTurnGroups + 1];  // and what comes after the turn
    int64_t num_groups = 0;
    for (int64_t panel = turn; panel < turn_end; panel += step) {
      groups[num_groups++] = group_at(panel, turn_end - panel);
    }
    groups[num_groups] = group_at(turn_end, step);
    for (int64_t block = 0; block < num_blocks; block += pass_blocks) {
      const int64_t block_end = least(block + pass_blocks, num_blocks);
      for (int64_t i = 0; i < num_groups; ++i) {
        const bool ends_pass = i + 1 == num_groups;
        const bool ends_turn = ends_pass && block_end == num_blocks;
        const Group& next = groups[ends_pass && !ends_turn ? 0 : i + 1];
        const int64_t next_block = ends_turn ? 0 : ends_pass ? block_end : block;
        multiply_group<Product>(call, range, groups[i], block, block_end, next, next_block,
                                range.sums + i * kRangeTokens * kGroupRows);
      }
    }
  }
}

#if !defined(VL_ISA_amx)
template <typename Format>
void multiply_quantised(const LinearCall& call, const LinearRange& range) {
#if !defined(VL_ISA_avx512_bf16)
  if (call.input_scales == nullptr) {
    return multiply_range<VectorProduct<AsReal<Format> > >(call, range);
  }
#endif
  multiply_range<VectorProduct<Format> >(call, range);
}
#endif

void multiply(const LinearCall& call, const LinearRange& range) {
#if defined(VL_ISA_amx)
  multiply_range<TileProduct>(call, range);
#else
  switch (call.format) {
#if defined(VL_ISA_avx512_bf16)
    case WeightFormat::kFloat32:
    case WeightFormat::kFloat16:
      break;  // linear_cpu takes AVX-512's kernels
#else
    case WeightFormat::kFloat32:
      return multiply_range<VectorProduct<DenseFloat32> >(call, range);
    case WeightFormat::kFloat16:
      return multiply_range<VectorProduct<DenseFloat16> >(call, range);
#endif
    case WeightFormat::kBFloat16:
      return multiply_range<VectorProduct<DenseBFloat16> >(call, range);
    case WeightFormat::kInt8:
      return multiply_quantised<Int8>(call, range);
    case WeightFormat::kQ4_0:
      return multiply_quantised<Q4_0>(call, range);
    case WeightFormat::kQ4_1:
      return multiply_quantised<Q4_1>(call, range);
    case WeightFormat::kQ8_0:
      return multiply_quantised<Q8_0>(call, range);
    case WeightFormat::kQ4_K:
      return multiply_quantised<Q4_K>(call, range);
    case WeightFormat::kQ5_K:
      return multiply_quantised<Q5_K>(call, range);
    case WeightFormat::kQ6_K:
      return multiply_quantised<Q6_K>(call, range);
  }
#endif
}

}  // namespace

const LinearKernels kLinearKernels = {sizeof(Element), kPartTokens, kReadsRows,
                                      padded_tokens,   prepare,     multiply};

}  // namespace vllm_lite::VL_ISA
