// Paged attention for Python.
#include "attention/attention_instructions.h"
#include "attention/attention_plan.h"
#include "attention/params.h"
#include "bindings/back_ends.h"
#include "bindings/op_args.h"
#include "bindings/op_lists.h"

namespace vllm_lite {
namespace {

void allow_hopper(bool allowed) { attention::hopper_allowed = allowed; }

template <void (*kKernel)(const PagedAttentionParams&)>
void paged_attention(Tensor out, Tensor query, Tensor kv_cache, Tensor block_tables, Tensor rows,
                     Tensor query_start, Tensor seq_lens, double scale, int64_t sliding_window,
                     double soft_cap, OptionalTensor alibi_slopes, OptionalTensor plan,
                     OptionalTensor workspace, double k_scale, double v_scale, int64_t stream) {
  constexpr const char* kOp = "paged_attention";
  check_heads(out, kOp, "out");
  check_heads(query, kOp, "query");
  const DType dtype = float_dtype(query, kOp);
  const KvDType kv_dtype = kv_cache_dtype(kv_cache, query, kOp);
  check(out.scalar_type() == query.scalar_type(), kOp, "out and query must have one dtype");
  check(
      out.size(0) == query.size(0) && out.size(1) == query.size(1) && out.size(2) == query.size(2),
      kOp, "out and query must have one shape");
  const int64_t num_heads = query.size(1), num_kv_heads = kv_cache.size(2),
                head_size = query.size(2);
  check(sliding_window >= 0, kOp, "sliding_window must be positive, or 0 for none");
  check(num_kv_heads > 0 && num_heads % num_kv_heads == 0, kOp,
        "num_heads must be a multiple of num_kv_heads");
  check(head_size == 32 || head_size == 64 || head_size == 80 || head_size == 96 ||
            head_size == 128 || head_size == 256,
        kOp, "head_size must be 32, 64, 80, 96, 128 or 256");
  check(rows.numel() == seq_lens.numel() && query_start.numel() == rows.numel() + 1, kOp,
        "rows, seq_lens and query_start differ in the number of sequences");
  check(block_tables.dim() == 2, kOp, "block_tables must be [max_rows, max_blocks]");
  check(!alibi_slopes || alibi_slopes->numel() == num_heads, kOp,
        "alibi_slopes must be [num_heads]");
  check_same_device(kOp, query, out, kv_cache, block_tables, rows, query_start, seq_lens,
                    alibi_slopes, plan, workspace);
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
  params.kv_dtype = kv_dtype;
  params.k_scale = static_cast<float>(k_scale);
  params.v_scale = static_cast<float>(v_scale);
  params.plan = int32_data(plan, kOp, "plan");
  params.workspace = float_data(workspace, kOp, "workspace");
  params.workspace_size = workspace ? workspace->numel() : 0;
  params.stream = stream;
  call<kKernel>(params);
}

int32_t to_int32(int64_t value, const char* op, const char* name) {
  check(value >= 0 && value <= INT32_MAX, op, (std::string(name) + " is out of range").c_str());
  return static_cast<int32_t>(value);
}

int64_t plan_step(Tensor query_start, Tensor seq_lens, int64_t num_heads, int64_t num_kv_heads,
                  int64_t sliding_window, int64_t num_multiprocessors, Tensor plan) {
  constexpr const char* kOp = "plan_attention";
  check(query_start.numel() == seq_lens.numel() + 1, kOp,
        "query_start and seq_lens differ in the number of sequences");
  PlanInput input{};
  input.query_start = int32_data(query_start, kOp, "query_start");
  input.seq_lens = int32_data(seq_lens, kOp, "seq_lens");
  input.num_seqs = static_cast<int32_t>(seq_lens.numel());
  input.num_heads = to_int32(num_heads, kOp, "num_heads");
  input.num_kv_heads = to_int32(num_kv_heads, kOp, "num_kv_heads");
  input.sliding_window = to_int32(sliding_window, kOp, "sliding_window");
  input.num_multiprocessors = to_int32(num_multiprocessors, kOp, "num_multiprocessors");
  return plan_attention(input, int32_data(plan, kOp, "plan"), plan.numel());
}

int64_t plan_size(int64_t num_tokens, int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads,
                  int64_t num_multiprocessors) {
  constexpr const char* kOp = "attention_plan_size";
  return attention_plan_size(num_tokens, num_seqs, to_int32(num_heads, kOp, "num_heads"),
                             to_int32(num_kv_heads, kOp, "num_kv_heads"),
                             to_int32(num_multiprocessors, kOp, "num_multiprocessors"));
}

int64_t workspace_size(int64_t num_kv_heads, int64_t head_size) {
  return attention_workspace_size(num_kv_heads, head_size);
}

STABLE_TORCH_LIBRARY_FRAGMENT(VL_OPS, m) {
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor kv_cache, Tensor block_tables, "
      "Tensor rows, Tensor query_start, Tensor seq_lens, float scale, int sliding_window, "
      "float soft_cap, Tensor? alibi_slopes, Tensor? plan, Tensor(b!)? workspace, float k_scale, "
      "float v_scale, int stream) -> ()");
  m.def(
      "plan_attention(Tensor query_start, Tensor seq_lens, int num_heads, int num_kv_heads, "
      "int sliding_window, int num_multiprocessors, Tensor(a!) plan) -> int");
  m.def(
      "attention_plan_size(int num_tokens, int num_seqs, int num_heads, int num_kv_heads, "
      "int num_multiprocessors) -> int");
  m.def("attention_workspace_size(int num_kv_heads, int head_size) -> int");
  m.def("allow_hopper_attention(bool allowed) -> ()");
}

#define VL_ATTENTION_OPS(back_end) \
  m.impl("paged_attention", TORCH_BOX(&paged_attention<paged_attention_##back_end>));
VL_IMPLEMENT_OPS(VL_ATTENTION_OPS)

// The same for every back end.
STABLE_TORCH_LIBRARY_IMPL(VL_OPS, CPU, m) { m.impl("plan_attention", TORCH_BOX(&plan_step)); }
STABLE_TORCH_LIBRARY_IMPL(VL_OPS, CompositeExplicitAutograd, m) {
  m.impl("attention_plan_size", TORCH_BOX(&plan_size));
  m.impl("attention_workspace_size", TORCH_BOX(&workspace_size));
  m.impl("allow_hopper_attention", TORCH_BOX(&allow_hopper));
}

}  // namespace
}  // namespace vllm_lite
