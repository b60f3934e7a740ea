// What the tests of the op cannot see: how the kernels use shared memory.
#include <cuda_on_host/options.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "attention/attention_plan.h"
#include "attention/params.h"

namespace vllm_lite {
namespace {

// A decode and a prompt, over every kind of tile, with 1.0 everywhere.
void attend(int32_t head_size, KvDType kv_dtype) {
  constexpr int32_t kHeads = 4, kBlockSize = 16, kBlocks = 20, kTokens = 101;
  const std::vector<int32_t> query_start = {0, 1, kTokens}, seq_lens = {300, 100}, rows = {0, 0};
  std::vector<int32_t> table(kBlocks);
  for (int32_t i = 0; i < kBlocks; ++i) table[static_cast<size_t>(i)] = i;
  const size_t cache_elements = static_cast<size_t>(kBlocks) * 2 * kBlockSize * head_size;
  const bool is_fp8 = kv_dtype == KvDType::kFloat8E4M3;
  const std::vector<uint16_t> query(static_cast<size_t>(kTokens * kHeads * head_size), 0x3f80);
  const std::vector<uint16_t> wide(is_fp8 ? 0 : cache_elements, 0x3f80);
  const std::vector<uint8_t> narrow(is_fp8 ? cache_elements : 0, 0x38);
  std::vector<uint16_t> out(query.size());
  std::vector<int32_t> plan(4096);
  std::vector<float> workspace(static_cast<size_t>(attention_workspace_size(1, head_size)));
  plan_attention({query_start.data(), seq_lens.data(), 2, kHeads, 1, 0, 132}, plan.data(), 4096);
  PagedAttentionParams params{};
  params.out = out.data();
  params.query = query.data();
  params.kv_cache = is_fp8 ? static_cast<const void*>(narrow.data()) : wide.data();
  params.block_tables = table.data();
  params.rows = rows.data();
  params.query_start = query_start.data();
  params.seq_lens = seq_lens.data();
  params.out_token_stride = params.query_token_stride = kHeads * head_size;
  params.block_table_stride = params.num_blocks = kBlocks;
  params.num_tokens = kTokens;
  params.max_rows = 1;
  params.num_seqs = 2;
  params.num_heads = kHeads;
  params.num_kv_heads = 1;
  params.head_size = head_size;
  params.block_size = kBlockSize;
  params.scale = 1;
  params.dtype = DType::kBFloat16;
  params.kv_dtype = kv_dtype;
  params.k_scale = params.v_scale = 1;
  params.plan = plan.data();
  params.workspace = workspace.data();
  params.workspace_size = static_cast<int64_t>(workspace.size());
  paged_attention_cuda(params);
  for (uint16_t x : out) ASSERT_EQ(x, 0x3f80);
}

TEST(PagedAttention, TilesAreReadWithoutBankConflicts) {
  for (int32_t head_size : {64, 80, 96, 128, 256}) {
    for (KvDType kv_dtype : {KvDType::kAsQuery, KvDType::kFloat8E4M3}) {
      const cuda_on_host::Counters before = cuda_on_host::counters();
      attend(head_size, kv_dtype);
      const cuda_on_host::Counters after = cuda_on_host::counters();
      EXPECT_GT(after.matrix_loads, before.matrix_loads);
      EXPECT_EQ(after.bank_conflicts, before.bank_conflicts) << "head size " << head_size;
    }
  }
}

}  // namespace
}  // namespace vllm_lite
