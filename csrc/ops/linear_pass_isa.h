// A pass: what a product by vectors or by AMX tiles is given at a time. Only for linear_isa.cpp.
#pragma once

#include "ops/linear_formats_isa.h"
#include "ops/linear_kernels.h"

namespace vllm_lite::VL_ISA {
namespace {

// A group of panels of the weight. Gated, a panel of up follows each of gate.
struct Group {
  int64_t first_row;  // of out
  int64_t num_panels;
  const uint8_t* panels[kGroupPanels];  // after the last, the last one again
};

// Some blocks of columns of one group of panels, times all tokens of a range.
struct Pass {
  const LinearCall* call;
  const Group* group;
  int64_t first_token;        // of the call
  float* sums;                // [tokens][kGroupRows], added to unless it is the first pass
  const void* input;          // of the format's Element, from the pass's first block on
  const float* input_scales;  // [block][tokens], of integers
  const float* block_sums;    // [block][tokens], where the format has minima
  int64_t input_tokens;       // of a prepared block
  const uint8_t* panels[kGroupPanels];
  const uint8_t* next[kGroupPanels];  // where the next pass, or the next group's first, begins
  int64_t num_panels;                 // of the group; `panels` after them are the last one again
  int64_t first_block, num_blocks;    // in the panels; what is of the input begins with the first
  int64_t num_tokens;
  bool is_first, is_last;  // the last finishes what it has summed
};

}  // namespace
}  // namespace vllm_lite::VL_ISA
