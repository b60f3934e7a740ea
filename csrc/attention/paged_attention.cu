// Entry of paged attention on CUDA, and the merge of what the plan has split.
#include <algorithm>
#include <string>

#include "attention/attention_item.cuh"
#include "core/check.h"

namespace vllm_lite {
namespace attention {
namespace {

constexpr int kMergeWarps = 4;

// A warp merges a row's ranges, in order, and writes it out. Memory-bound: (head_size + 2) * 4
// bytes per row and range.
template <typename T, int kHeadSize>
__global__ void __launch_bounds__(32 * kMergeWarps)
    merge_kernel(const __grid_constant__ KernelArgs args) {
  constexpr int kPairs = (kHeadSize / 2 + 31) / 32;  // of elements, per lane
  const int lane = lane_index(), warp = static_cast<int>(threadIdx.x) / 32;
  const int num_heads = args.params.num_kv_heads;
  const PlanHeader header = plan_header(args);
  const int first_item = header.num_decode_items + header.num_prefill_items;
  // Per item and head kDecodeRows warps, each with every kDecodeRows-th row.
  const int count = header.num_merge_items * num_heads * kDecodeRows;
  for (int i = static_cast<int>(blockIdx.x) * kMergeWarps + warp; i < count;
       i += static_cast<int>(gridDim.x) * kMergeWarps) {
    const int item_head = i / kDecodeRows;
    const ItemView view(args, plan_item(args, first_item + item_head / num_heads),
                        item_head % num_heads);
    for (int row = view.item.row_begin + i % kDecodeRows; row < view.row_end();
         row += kDecodeRows) {
      float maximum = -infinity(), weight = 0;
      float2 total[kPairs] = {};
#pragma unroll 4
      for (int range = view.item.range_begin; range < view.item.range_end; ++range) {
        const int64_t partial = view.partial_row(range, row);
        const float2 state = __ldg(view.partial_state(args, partial));
        const auto* sums = reinterpret_cast<const float2*>(view.partial_sums(args, partial));
        float2 part[kPairs] = {};
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          if (p * 32 + lane >= kHeadSize / 2) continue;
          part[p] = __ldg(sums + p * 32 + lane);
        }
        const Merge merge(maximum, weight, state.x, state.y);
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          total[p].x = merge.apply(total[p].x, part[p].x);
          total[p].y = merge.apply(total[p].y, part[p].y);
        }
        maximum = merge.maximum;
        weight = merge.weight;
      }
      const float factor = inverse(weight, args.value_factor);
      uint32_t* out = reinterpret_cast<uint32_t*>(
          static_cast<T*>(args.params.out) + view.element(args, row, args.params.out_token_stride));
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        if (p * 32 + lane >= kHeadSize / 2) continue;
        out[p * 32 + lane] =
            device::pack<T>(result(total[p].x, factor), result(total[p].y, factor));
      }
    }
  }
}

template <typename T, int kHeadSize>
void launch(const KernelArgs& args) {
  if (args.params.kv_dtype == KvDType::kFloat8E4M3) {
    launch_items<T, Float8E4M3, kHeadSize>(args);
  } else {
    launch_items<T, T, kHeadSize>(args);
  }
  static const int blocks = persistent_blocks(merge_kernel<T, kHeadSize>, 32 * kMergeWarps, 0);
  VL_LAUNCH((merge_kernel<T, kHeadSize>), blocks, 32 * kMergeWarps, 0, args.params.stream, args);
}

template <typename T>
void launch(const KernelArgs& args) {
  switch (args.params.head_size) {
    case 64:
      return launch<T, 64>(args);
    case 80:
      return launch<T, 80>(args);
    case 96:
      return launch<T, 96>(args);
    case 128:
      return launch<T, 128>(args);
    case 256:
      return launch<T, 256>(args);
    default:
      throw Error("paged_attention: head_size is " + std::to_string(args.params.head_size) +
                  "; it must be 64, 80, 96, 128 or 256");
  }
}

ScoreFactors score_factors(const PagedAttentionParams& params) {
  const float scale = params.scale * params.k_scale;
  const bool has_cap = params.soft_cap > 0;
  const bool bends = has_cap || params.alibi_slopes != nullptr || !(scale > 0);
  if (!bends) return {scale * kLog2E, false, false, 0, 0};
  const float cap = has_cap ? params.soft_cap : 1;
  return {cap * kLog2E, true, has_cap, scale / cap, 1 / cap};
}

void check_params(const PagedAttentionParams& params) {
  VL_CHECK(params.dtype != DType::kFloat32,
           "paged_attention: float32 has no CUDA kernel; use bfloat16 or float16");
  VL_CHECK(params.kv_dtype != KvDType::kInt8,
           "paged_attention: an int8 KV cache has no CUDA kernel; use float8_e4m3fn");
  VL_CHECK(params.plan != nullptr, "paged_attention: CUDA needs a plan: see plan_attention");
  VL_CHECK(reinterpret_cast<uintptr_t>(params.plan) % 16 == 0,
           "paged_attention: plan must be 16-byte aligned");
  const int64_t workspace = attention_workspace_size(params.num_kv_heads, params.head_size);
  VL_CHECK(params.workspace != nullptr && params.workspace_size >= workspace,
           "paged_attention: workspace has " + std::to_string(params.workspace_size) +
               " elements; CUDA needs attention_workspace_size(), " + std::to_string(workspace));
  VL_CHECK(is_block_size(params.block_size), "paged_attention: block_size is " +
                                                 std::to_string(params.block_size) +
                                                 "; it must be a power of two from 16 to 256");
  VL_CHECK(params.num_blocks * 2 * params.num_kv_heads * params.block_size < kNoRow,
           "paged_attention: kv_cache has more than 2^32 - 2 rows");
  VL_CHECK(reinterpret_cast<uintptr_t>(params.kv_cache) % 16 == 0,
           "paged_attention: kv_cache must be 16-byte aligned");
  VL_CHECK(params.out_token_stride % 2 == 0 && params.query_token_stride % 2 == 0,
           "paged_attention: the token strides of out and query must be even");
}

}  // namespace
}  // namespace attention

void paged_attention_cuda(const PagedAttentionParams& params) {
  using namespace attention;
  check_params(params);
  if (params.num_seqs == 0 || params.num_tokens == 0) return;
  KernelArgs args{};
  args.params = params;
  if (params.kv_dtype == KvDType::kAsQuery) args.params.k_scale = args.params.v_scale = 1;
  args.factors = score_factors(args.params);
  args.value_factor = args.params.v_scale;
  args.window = params.sliding_window == 0 ? kNoWindow : std::min(params.sliding_window, kNoWindow);
  args.group = params.num_heads / params.num_kv_heads;
  args.block_shift = __builtin_ctz(params.block_size);
  if (params.dtype == DType::kBFloat16) {
    launch<BFloat16>(args);
  } else {
    launch<Float16>(args);
  }
}

}  // namespace vllm_lite
