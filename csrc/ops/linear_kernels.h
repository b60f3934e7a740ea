// What linear_isa.cpp has for each instruction set, and linear_cpu.cpp calls.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "ops/linear_layout.h"

namespace vllm_lite {

// Tokens whose sums a thread holds at a time. A multiple of every kernel's tile.
constexpr int64_t kRangeTokens = 192;
// Panels that are multiplied together.
constexpr int64_t kGroupPanels = 4;
constexpr int64_t kGroupRows = kGroupPanels * kPanelRows;
// Groups of which a thread holds the sums at a time, where passes take turns.
constexpr int64_t kTurnGroups = 8;
// Blocks of columns after which the sums go back to memory, while the panels' part is in L1.
constexpr int64_t kPassBlocks = 8;
// A block of a panel, widened to 32 bits per weight, with two scales.
constexpr int64_t kWidenedBlockBytes = (kBlockColumns + 2) * kPanelRows * 4;

// The input in the order in which the kernels read it: [block][token][32 columns] (AMX: rows,
// [token][block][32 columns]), zeros after the last column and the last token. For quantised
// weights, unless it is of float32, a block is integers of 16 bits, the largest of which is 32767,
// and their scale.
struct LinearInput {
  void* prepared;     // elements of the kernel's type
  float* scales;      // [block][token], of integers; otherwise nullptr
  float* block_sums;  // [block][token], where the format has minima; otherwise nullptr
  const void* input;
  int64_t input_stride;
  int64_t columns;
  int64_t num_tokens;       // of `input`
  int64_t prepared_tokens;  // padded_tokens(num_tokens)
  DType dtype;
};

struct LinearCall {
  void* out;  // of the first prepared token
  const void* packed;
  const void* bias;
  const void* prepared;
  const float* input_scales;
  const float* block_sums;
  WeightFormat format;
  DType out_dtype;
  int64_t rows, columns, out_stride, prepared_tokens;  // rows of out
  int64_t prepared_stride;  // elements between the tokens of prepared rows
  bool is_gated;            // as in LinearParams
};

// One thread's part of a call. Panels are counted in rows of out; a gated one stands for two.
struct LinearRange {
  int64_t first_token, num_tokens;  // at most kRangeTokens
  int64_t first_panel, num_panels;
  float* sums;       // scratch: [kTurnGroups][kRangeTokens][kGroupRows]
  uint8_t* widened;  // scratch: [kGroupPanels][kPassBlocks] of kWidenedBlockBytes
};

struct LinearKernels {
  int64_t element_bytes;  // of a prepared input that is no integers
  int64_t part_tokens;    // whole tiles: tokens that are worth reading a weight for once more
  bool reads_rows;        // an input of whole blocks needs no preparation
  int64_t (*padded_tokens)(int64_t num_tokens);
  // Prepares tokens [first, last) of the padded ones.
  void (*prepare)(const LinearInput& input, int64_t first, int64_t last);
  void (*multiply)(const LinearCall& call, const LinearRange& range);
};

namespace portable {
extern const LinearKernels kLinearKernels;
}
namespace avx2 {
extern const LinearKernels kLinearKernels;
}
namespace avx512 {
extern const LinearKernels kLinearKernels;
}
// Integers, and bfloat16 weights times bfloat16 inputs.
namespace avx512_bf16 {
extern const LinearKernels kLinearKernels;
}
// bfloat16 inputs and weights.
namespace amx {
extern const LinearKernels kLinearKernels;
}

}  // namespace vllm_lite
