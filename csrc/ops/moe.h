// What a layer of experts needs around its matrix products: which experts a token goes to, the
// tokens' rows in the experts' order, and back.
//
// A pair is (token, choice), numbered token * k + choice. Pairs are sorted by expert: the rows of
// one expert lie together, from expert_start[e] to expert_start[e + 1] - 1.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace vllm_lite {

// The k experts with the largest logits, largest first, the lowest id among equals (NaN counts as
// the smallest), and their softmax weights: over all experts or, renormalized, over the k.
struct RouteExpertsParams {
  float* weights;         // [num_tokens, k]
  int32_t* ids;           // [num_tokens, k]
  const void* logits;     // [num_tokens, num_experts]
  int64_t logits_stride;  // elements
  int32_t num_tokens;
  int32_t num_experts;  // up to kMaxExperts
  int32_t k;            // up to kMaxExpertsPerToken and num_experts
  bool renormalize;
  DType dtype;  // of logits
  int64_t stream;
};
constexpr int kMaxExperts = 512;
constexpr int kMaxExpertsPerToken = 16;
void route_experts_cpu(const RouteExpertsParams& params);
void route_experts_cuda(const RouteExpertsParams& params);

// Stable. An id outside 0 .. num_experts - 1 is an expert of another rank: its pairs come last,
// after expert_start[num_experts], and have no row.
struct PermuteTokensParams {
  const int32_t* ids;     // [num_pairs]
  int32_t* order;         // [num_pairs], row -> pair
  int32_t* rows;          // [num_pairs], pair -> row, -1: none
  int32_t* expert_start;  // [num_experts + 1]
  int32_t num_pairs;
  int32_t num_experts;
  int64_t stream;
};
void permute_tokens_cpu(const PermuteTokensParams& params);
void permute_tokens_cuda(const PermuteTokensParams& params);

// out[row] = input[order[row] / k]. CPU throws Error for a pair that input does not have; CUDA
// leaves its row as it is.
struct GatherRowsParams {
  void* out;                         // [num_rows, row_bytes]
  const void* input;                 // [num_tokens, row_bytes]
  const int32_t* order;              // [num_rows]
  int64_t out_stride, input_stride;  // bytes
  int64_t row_bytes;
  int32_t num_rows;
  int32_t num_tokens;
  int32_t k;
  int64_t stream;
};
void gather_rows_cpu(const GatherRowsParams& params);
void gather_rows_cuda(const GatherRowsParams& params);

// out[token] = sum over choices, in their order and in float32, of weight * expert row. A pair
// without a row (negative) adds nothing; CPU throws Error for a row that expert_rows does not have,
// CUDA leaves it out.
struct CombineExpertsParams {
  void* out;                               // [num_tokens, size]
  const void* expert_rows;                 // [num_rows, size]
  const int32_t* rows;                     // [num_tokens, k], as permute_tokens gives them
  const float* weights;                    // [num_tokens, k]
  int64_t out_stride, expert_rows_stride;  // elements
  int32_t num_tokens;
  int32_t num_rows;
  int32_t size;
  int32_t k;
  DType dtype;  // of out and expert_rows
  int64_t stream;
};
void combine_experts_cpu(const CombineExpertsParams& params);
void combine_experts_cuda(const CombineExpertsParams& params);

}  // namespace vllm_lite
