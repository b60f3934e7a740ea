// Paged attention: what the kernel reads and writes. One contract for CPU and CUDA.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace vllm_lite {

// The sizes of a block of the cache, in tokens: powers of two from 16 to 256. Tiles and ranges of
// the kernels do not depend on it.
constexpr bool is_block_size(int64_t tokens) {
  return tokens >= 16 && tokens <= 256 && (tokens & (tokens - 1)) == 0;
}

// Attention of any mix of prefills, chunks and decodes over a paged KV cache, causal. Query token t
// of sequence s (t = 0 .. query_start[s+1]-query_start[s]-1) stands at position
// seq_lens[s] - num_query_tokens(s) + t and sees the positions up to and including its own (the
// last `sliding_window` of them, if that is not 0). The KV of the step's own tokens is already
// stored.
//
// Contract "row": the result of a query token depends on its own query and the KV it sees alone,
// bit for bit: not on the other sequences and the blocks that it shares with them, on how its
// prompt was cut into chunks, or on the thread count.
//
// score = scale * q·k (+ alibi_slopes[head] * (key position - query position));
// soft_cap > 0: score = soft_cap * tanh(score / soft_cap), before the mask.
// All sums in float32.
//
// Of a block table only the entries are read that some query token sees: those of blocks that have
// fallen out of the sliding window, and those past the sequence's end, may hold anything.
struct PagedAttentionParams {
  void* out;                    // [num_tokens, num_heads, head_size]
  const void* query;            // [num_tokens, num_heads, head_size]
  const void* kv_cache;         // [num_blocks, 2 (K, V), num_kv_heads, block_size, head_size];
                                // CPU: as in core/kv_layout_cpu.h
  const int32_t* block_tables;  // [max_rows, block_table_stride]
  const int32_t* rows;          // [num_seqs], row of block_tables
  const int32_t* query_start;   // [num_seqs + 1], cumulative query tokens
  const int32_t* seq_lens;      // [num_seqs], tokens with KV, this step's included
  const float* alibi_slopes;    // [num_heads] or nullptr
  int64_t out_token_stride;     // elements
  int64_t query_token_stride;
  int64_t block_table_stride;
  int64_t num_blocks;
  int64_t num_tokens;
  int64_t max_rows;
  int32_t num_seqs;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;   // 64, 80, 96, 128 or 256; on the CPU 32 too
  int32_t block_size;  // as is_block_size()
  float scale;
  int32_t sliding_window;  // 0: none
  float soft_cap;          // 0: none
  DType dtype;             // of out and query
  KvDType kv_dtype;
  float k_scale;  // only for kFloat8E4M3
  float v_scale;
  // CUDA only: the step's plan (attention_plan.h) and room for what it splits.
  const int32_t* plan;
  float* workspace;
  int64_t workspace_size;  // elements, at least attention_workspace_size()
  int64_t stream;          // CUDA stream; 0 on CPU
};

// Throws Error, and has written nothing, if query_start is not ascending within num_tokens, a row
// is not one of block_tables, a sequence is longer than its table, or a table entry that is read
// names a block that the cache does not have.
void paged_attention_cpu(const PagedAttentionParams& params);

// bf16 and fp16. The indices are in device memory, where the host does not look: a query token
// outside num_tokens is skipped; a row or a block that does not exist is never followed, and makes
// the sequence's results NaN where the kernel meets it.
void paged_attention_cuda(const PagedAttentionParams& params);

}  // namespace vllm_lite
