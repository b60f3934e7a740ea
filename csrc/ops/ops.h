// The small ops of a transformer layer, one POD params struct and one function each.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/isa.h"
#include "core/row_state.h"

namespace vllm_lite {

// out = x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, statistics in float32.
// With a residual: residual += input first (rounded to dtype), and x is the new residual.
// Rows are (outer, inner) so that q and k heads inside a fused qkv row can be normalised in place:
// row (i, j) of a tensor begins at i * outer_stride + j * inner_stride.
struct RmsNormParams {
  void* out;
  const void* input;
  void* residual;      // or nullptr
  const void* weight;  // [size]
  // Strides are in elements.
  int64_t out_outer_stride, out_inner_stride;
  int64_t input_outer_stride, input_inner_stride;
  int64_t residual_outer_stride, residual_inner_stride;
  int64_t num_outer, num_inner;
  int32_t size;
  float epsilon;
  DType dtype;
  int64_t stream;
};
VL_DECLARE_ISA_KERNEL(rms_norm, RmsNormParams)
void rms_norm_cpu(const RmsNormParams& params);
void rms_norm_cuda(const RmsNormParams& params);

// Rotary embedding in place on the first rotary_size elements of each head, halves rotated together
// (x[i], x[i + rotary_size/2]); rotation in float32.
struct RopeParams {
  void* query;               // [num_tokens, num_heads, head_size]
  void* key;                 // [num_tokens, num_kv_heads, head_size]
  const int32_t* positions;  // [num_tokens], below max_position
  const float* cos_sin;      // [max_position, rotary_size]: cosines, then sines
  // Strides are in elements.
  int64_t query_token_stride, key_token_stride;
  int64_t max_position;
  int32_t num_tokens;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t rotary_size;
  DType dtype;
  int64_t stream;
};
VL_DECLARE_ISA_KERNEL(rope, RopeParams)
void rope_cpu(const RopeParams& params);
void rope_cuda(const RopeParams& params);

// out = silu(gate) * up, where a row of gate_up is [gate | up].
struct SiluMulParams {
  void* out;            // [num_tokens, size]
  const void* gate_up;  // [num_tokens, 2 * size]
  // Strides are in elements.
  int64_t out_token_stride, gate_up_token_stride;
  int32_t num_tokens;
  int32_t size;
  DType dtype;
  int64_t stream;
};
VL_DECLARE_ISA_KERNEL(silu_mul, SiluMulParams)
void silu_mul_cpu(const SiluMulParams& params);
void silu_mul_cuda(const SiluMulParams& params);

// out[i] = table[token_ids[i]], rounded once. An id of -1 - r stands for the token that row r
// sampled last, last_tokens[r]: a step can be prepared before the one that gives its tokens is
// done. An id that leads out of the table or of last_tokens: zeros on CUDA, which cannot raise; on
// CPU an Error.
struct EmbeddingParams {
  void* out;                   // [num_tokens, size]
  const void* table;           // [vocab_size, size], contiguous
  const int32_t* token_ids;    // [num_tokens]
  const int32_t* last_tokens;  // [max_rows], or nullptr
  int64_t out_token_stride;    // elements
  int32_t num_tokens;
  int32_t size;
  int32_t vocab_size;
  int32_t max_rows;
  DType out_dtype;
  DType table_dtype;
  int64_t stream;
};
VL_DECLARE_ISA_KERNEL(embedding, EmbeddingParams)
void embedding_cpu(const EmbeddingParams& params);
// Throws Error for an id that leads out.
void check_token_ids(const int32_t* token_ids, int32_t num_tokens, const int32_t* last_tokens,
                     int32_t max_rows, int64_t vocab_size);
void embedding_cuda(const EmbeddingParams& params);

// GGUF block formats, under ggml's numbers.
enum class GgmlType : int32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};
struct DequantizeParams {
  void* out;  // [num_elements]
  const void* blocks;
  int64_t num_elements;  // a multiple of the format's block length
  GgmlType type;
  DType dtype;  // of out
  int64_t stream;
};
// Bytes of `num_elements` in a format. Throws Error for an unknown type or a count that does not
// fill blocks.
int64_t dequantize_block_bytes(GgmlType type, int64_t num_elements);
VL_DECLARE_ISA_KERNEL(dequantize, DequantizeParams)
void dequantize_cpu(const DequantizeParams& params);

// Sampling, one call for all rows of a step. The order of processing of a row's logits, after which
// the choice is made (logprobs and ranks are of the raw logits, before any of it):
//   1. logit_bias;
//   2. allowed ids and the row's token mask (others masked); stop ids masked while positions[i] <
//      min_total_tokens;
//   3. repetition penalty (prompt and output), frequency and presence penalties (output);
//   4. temperature 0: the largest logit, the lowest id among equals. Otherwise divide by it, then
//   5. top_k, then top_p over what is left, then min_p relative to the likeliest; each keeps at
//      least one and orders by (logit descending, id ascending), so that ties have one answer; the
//      token that crosses top_p stays;
//   6. Gumbel-max with Philox4x32-10 keyed by (seed) and counted by (position, token id): one noise
//      per token id, so that the choice depends on nothing but the row.
// A row whose logits hold a NaN or +inf or no finite candidate, or whose rows[i] lies outside
// max_rows, yields token -1, rank 0 and logprob -inf; one of whose candidates steps 1 to 3 leave
// none, token -2. Ids outside the vocabulary in the lists below are ignored. Two rows of one call
// must not share a row of output_counts. -inf logits are never chosen; their logprobs are reported
// as -inf.
struct SampleParams {
  const float* logits;       // [num_rows, vocab_size]
  int64_t logits_stride;     // elements
  const int32_t* rows;       // [num_rows], row of the per-row state below
  const int32_t* positions;  // [num_rows], position of the sampled token (= tokens so far)
  // What rows keep from step to step, indexed by rows[i].
  const RowState* row_state;  // [max_rows]
  // Of each row: bias ids, bias values (floats), allowed ids and stop ids, back to back and as many
  // as its RowState says.
  const int32_t* id_lists;  // [max_rows, id_lists_stride], or nullptr: no row has any
  int64_t id_lists_stride;  // elements
  // Both [max_rows, vocab_size], or nullptr: no row has penalties.
  int32_t* output_counts;      // tokens generated; the sampled token is counted here
  const uint8_t* prompt_mask;  // 1: in the prompt
  // One bit for each token, lowest first, 1: allowed; or nullptr: no row has a mask.
  const int32_t* token_masks;  // [num_masks, ceil(vocab_size / 32)]
  const int32_t* mask_index;   // [num_rows], into token_masks; not one of them: no mask
  int32_t num_masks;
  // Results.
  int32_t* token_ids;  // [num_rows], below 0: row failed
  // [max_rows] or nullptr; of rows[i], if there is such a row, it becomes the token, 0 if row i
  // failed
  int32_t* last_tokens;
  float* logprobs;      // [num_rows] or nullptr
  int32_t* ranks;       // [num_rows] or nullptr; 1 + number of raw logits greater than the token's
  int32_t* top_ids;     // [num_rows, max_logprobs] or nullptr; unused entries -1
  float* top_logprobs;  // [num_rows, max_logprobs]
  // CUDA only: SampleWorkspace's num_bytes or more, 16-byte aligned.
  void* workspace;
  int64_t workspace_bytes;
  int32_t num_rows;
  int32_t vocab_size;
  int32_t max_rows;
  int32_t max_logprobs;
  int64_t stream;
};
void sample_cpu(const SampleParams& params);
void sample_cuda(const SampleParams& params);

}  // namespace vllm_lite
