// Dense products on the CPU from packed weights: out = input @ weight^T (+ bias), or the gated
// activation of two such products, silu(gate) * up.
//
// A weight is packed once, at load, into panels of kPanelRows of its rows (output features): the
// layout that every instruction set reads, one stream of memory per panel (linear_layout.h). Of
// quantised formats the panels hold the file's own numbers, and take its size.
//
// A value of `out` is a float32 sum over the columns in their order, of blocks of 32 columns (Q6_K:
// 16) where the format has a scale for each, the bias last. Inputs of 16 bits meet quantised
// weights as integers: every 32 columns of a token are rounded to 16 bits and a scale, which costs
// 2^-16 of the largest of them (bfloat16 itself costs up to 2^-8), and the sum of a block is
// exact. That order depends on the weight's format, the input's dtype and the instruction set
// alone: not on how many rows `input` has, nor on threads. An input that is not finite makes its
// token's outputs NaN or infinite; products of bfloat16 weights and inputs on AVX-512-BF16 and AMX
// take subnormal numbers for zeros, and so do results of bfloat16, as those instructions do.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace vllm_lite {

enum class WeightFormat : int32_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt8,  // one float32 scale per row
  kQ4_0,  // GGUF's blocks
  kQ4_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
};

constexpr int64_t kPanelRows = 16;

// Bytes of a packed weight [rows, columns], where rows count up to a multiple of kPanelRows and
// columns up to a multiple of 32. Throws Error if the format's blocks do not divide `columns`.
int64_t packed_weight_bytes(WeightFormat format, int64_t rows, int64_t columns);

// Bytes of one row of a weight as its file has it. Throws Error as packed_weight_bytes does.
int64_t source_row_bytes(WeightFormat format, int64_t columns);

struct PackWeightParams {
  void* packed;         // packed_weight_bytes(format, rows, columns), 64-byte aligned
  const void* source;   // num_rows rows of `columns`, row after row, as the format's file has them
  const float* scales;  // kInt8: [num_rows]; otherwise nullptr
  WeightFormat format;
  int64_t rows, columns;        // of the whole weight
  int64_t first_row, num_rows;  // which rows `source` has
};
// Parts of one weight may be packed one after the other, in any order; not at the same time.
void pack_weight_cpu(const PackWeightParams& params);

struct LinearParams {
  void* out;          // [num_tokens, rows], apart from input
  const void* input;  // [num_tokens, columns]
  const void* packed;
  const void* bias;  // one for each of the weight's rows, of out's dtype; or nullptr
  WeightFormat format;
  int64_t num_tokens, rows, columns;
  int64_t out_stride, input_stride;  // elements between tokens
  DType dtype;                       // of input
  DType out_dtype;                   // the input's, or kFloat32
  // The weight has 2 * rows rows, those of gate and then those of up, whose products are rounded to
  // out_dtype before out is silu(gate) * up: the bits of silu_mul (ops.h), but for subnormal
  // results. Only where rows are a multiple of kPanelRows.
  bool is_gated;
};
void linear_cpu(const LinearParams& params);

// embedding (ops.h) from a packed weight as the table: what a model whose head is its embedding
// has.
struct PackedEmbeddingParams {
  void* out;                   // [num_tokens, columns]
  const void* packed;          // [rows, columns]
  const int32_t* token_ids;    // [num_tokens]
  const int32_t* last_tokens;  // [max_rows], or nullptr
  WeightFormat format;
  int64_t rows, columns;
  int64_t out_stride;  // elements
  int32_t num_tokens;
  int32_t max_rows;
  DType dtype;  // of out
};
void packed_embedding_cpu(const PackedEmbeddingParams& params);

}  // namespace vllm_lite
