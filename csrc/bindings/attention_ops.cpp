// Paged attention for Python.
#include "attention/params.h"
#include "bindings/back_ends.h"
#include "bindings/op_args.h"

namespace vllm_lite {
namespace {

template <void (*kKernel)(const PagedAttentionParams&)>
void paged_attention(Tensor out, Tensor query, Tensor kv_cache, Tensor block_tables, Tensor rows,
                     Tensor query_start, Tensor seq_lens, double scale, int64_t sliding_window,
                     double soft_cap, OptionalTensor alibi_slopes, int64_t stream) {
  constexpr const char* kOp = "paged_attention";
  check_heads(out, kOp, "out");
  check_heads(query, kOp, "query");
  check(kv_cache.dim() == 5 && kv_cache.size(1) == 2 && kv_cache.is_contiguous(), kOp,
        "kv_cache must be contiguous [num_blocks, 2, num_kv_heads, block_size, head_size]");
  const DType dtype = float_dtype(query, kOp);
  check(out.scalar_type() == query.scalar_type() && kv_cache.scalar_type() == query.scalar_type(),
        kOp, "out, query and kv_cache must have one dtype");
  check(
      out.size(0) == query.size(0) && out.size(1) == query.size(1) && out.size(2) == query.size(2),
      kOp, "out and query must have one shape");
  const int64_t num_heads = query.size(1), num_kv_heads = kv_cache.size(2),
                head_size = query.size(2);
  check(kv_cache.size(4) == head_size, kOp, "kv_cache and query differ in head_size");
  check(kv_cache.size(3) > 0, kOp, "the block_size of kv_cache must be at least 1");
  check(sliding_window >= 0, kOp, "sliding_window must be positive, or 0 for none");
  check(num_kv_heads > 0 && num_heads % num_kv_heads == 0, kOp,
        "num_heads must be a multiple of num_kv_heads");
  check(
      head_size == 64 || head_size == 80 || head_size == 96 || head_size == 128 || head_size == 256,
      kOp, "head_size must be 64, 80, 96, 128 or 256");
  check(rows.numel() == seq_lens.numel() && query_start.numel() == rows.numel() + 1, kOp,
        "rows, seq_lens and query_start differ in the number of sequences");
  check(block_tables.dim() == 2, kOp, "block_tables must be [max_rows, max_blocks]");
  check(!alibi_slopes || alibi_slopes->numel() == num_heads, kOp,
        "alibi_slopes must be [num_heads]");
  check_same_device(kOp, query, out, kv_cache, block_tables, rows, query_start, seq_lens,
                    alibi_slopes);
  PagedAttentionParams params{};
  params.out = out.mutable_data_ptr();
  params.query = query.const_data_ptr();
  params.kv_cache = kv_cache.const_data_ptr();
  params.block_tables = int32_data(block_tables, kOp, "block_tables");
  params.rows = int32_data(rows, kOp, "rows");
  params.query_start = int32_data(query_start, kOp, "query_start");
  params.seq_lens = int32_data(seq_lens, kOp, "seq_lens");
  params.alibi_slopes = float_data(alibi_slopes, kOp, "alibi_slopes");
  params.out_token_stride = out.stride(0);
  params.query_token_stride = query.stride(0);
  params.block_table_stride = block_tables.size(1);
  params.num_blocks = kv_cache.size(0);
  params.num_tokens = query.size(0);
  params.max_rows = block_tables.size(0);
  params.num_seqs = static_cast<int32_t>(rows.numel());
  params.num_heads = static_cast<int32_t>(num_heads);
  params.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  params.head_size = static_cast<int32_t>(head_size);
  params.block_size = static_cast<int32_t>(kv_cache.size(3));
  params.scale = static_cast<float>(scale);
  params.sliding_window = static_cast<int32_t>(sliding_window);
  params.soft_cap = static_cast<float>(soft_cap);
  params.dtype = dtype;
  params.stream = stream;
  kKernel(params);
}

STABLE_TORCH_LIBRARY_FRAGMENT(VL_OPS, m) {
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor kv_cache, Tensor block_tables, "
      "Tensor rows, Tensor query_start, Tensor seq_lens, float scale, int sliding_window, "
      "float soft_cap, "
      "Tensor? alibi_slopes, int stream) -> ()");
}

#define VL_ATTENTION_OPS(back_end) \
  m.impl("paged_attention", TORCH_BOX(&paged_attention<paged_attention_##back_end>));
VL_IMPLEMENT_OPS(VL_ATTENTION_OPS)

}  // namespace
}  // namespace vllm_lite
