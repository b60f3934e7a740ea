// What expert layers need around their matrix products, for Python.
#include "bindings/back_ends.h"
#include "bindings/op_args.h"
#include "bindings/op_lists.h"
#include "ops/moe.h"

namespace vllm_lite {
namespace {

void check_rows(const Tensor& t, const char* op, const char* message) {
  check(t.dim() == 2 && t.stride(1) == 1, op, message);
}

template <void (*kKernel)(const RouteExpertsParams&)>
void route_experts(Tensor weights, Tensor ids, Tensor logits, bool renormalize, int64_t stream) {
  constexpr const char* kOp = "route_experts";
  check_rows(logits, kOp, "logits must be [num_tokens, num_experts], rows contiguous");
  check(weights.dim() == 2 && ids.dim() == 2 && weights.size(0) == logits.size(0) &&
            ids.size(0) == logits.size(0) && ids.size(1) == weights.size(1),
        kOp, "weights and ids must be [num_tokens, k]");
  const int64_t num_experts = logits.size(1), k = ids.size(1);
  check(num_experts <= kMaxExperts, kOp, "at most 512 experts are supported");
  check(k >= 1 && k <= num_experts && k <= kMaxExpertsPerToken, kOp,
        "k must be from 1 to 16 and at most the number of experts");
  check_same_device(kOp, logits, weights, ids);
  RouteExpertsParams params{};
  params.weights = float_data(weights, kOp, "weights");
  params.ids = int32_data(ids, kOp, "ids");
  params.logits = logits.const_data_ptr();
  params.logits_stride = logits.stride(0);
  params.num_tokens = static_cast<int32_t>(logits.size(0));
  params.num_experts = static_cast<int32_t>(num_experts);
  params.k = static_cast<int32_t>(k);
  params.renormalize = renormalize;
  params.dtype = float_dtype(logits, kOp);
  params.stream = stream;
  kKernel(params);
}

template <void (*kKernel)(const PermuteTokensParams&)>
void permute_tokens(Tensor ids, Tensor order, Tensor rows, Tensor expert_start, int64_t stream) {
  constexpr const char* kOp = "permute_tokens";
  check(order.numel() == ids.numel() && rows.numel() == ids.numel(), kOp,
        "order and rows must have as many elements as ids");
  check(expert_start.dim() == 1 && expert_start.size(0) >= 1, kOp,
        "expert_start must be [num_experts + 1]");
  check_same_device(kOp, ids, order, rows, expert_start);
  PermuteTokensParams params{};
  params.ids = int32_data(ids, kOp, "ids");
  params.order = int32_data(order, kOp, "order");
  params.rows = int32_data(rows, kOp, "rows");
  params.expert_start = int32_data(expert_start, kOp, "expert_start");
  params.num_pairs = static_cast<int32_t>(ids.numel());
  params.num_experts = static_cast<int32_t>(expert_start.size(0) - 1);
  params.stream = stream;
  kKernel(params);
}

template <void (*kKernel)(const GatherRowsParams&)>
void gather_rows(Tensor out, Tensor input, Tensor order, int64_t k, int64_t stream) {
  constexpr const char* kOp = "gather_rows";
  check_rows(out, kOp, "out must be [num_rows, size], rows contiguous");
  check_rows(input, kOp, "input must be [num_tokens, size], rows contiguous");
  check(out.size(1) == input.size(1) && out.scalar_type() == input.scalar_type(), kOp,
        "out and input differ in size or dtype");
  check(order.numel() == out.size(0), kOp, "order must have an element per row of out");
  check(k >= 1 && k <= INT32_MAX, kOp, "k must be positive");
  check_same_device(kOp, out, input, order);
  const int64_t element_bytes = static_cast<int64_t>(out.element_size());
  GatherRowsParams params{};
  params.out = out.mutable_data_ptr();
  params.input = input.const_data_ptr();
  params.order = int32_data(order, kOp, "order");
  params.out_stride = out.stride(0) * element_bytes;
  params.input_stride = input.stride(0) * element_bytes;
  params.row_bytes = out.size(1) * element_bytes;
  params.num_rows = static_cast<int32_t>(out.size(0));
  params.num_tokens = static_cast<int32_t>(input.size(0));
  params.k = static_cast<int32_t>(k);
  params.stream = stream;
  call<kKernel>(params);
}

template <void (*kKernel)(const CombineExpertsParams&)>
void combine_experts(Tensor out, Tensor expert_rows, Tensor rows, Tensor weights, int64_t stream) {
  constexpr const char* kOp = "combine_experts";
  check_rows(out, kOp, "out must be [num_tokens, size], rows contiguous");
  check_rows(expert_rows, kOp, "expert_rows must be [num_rows, size], rows contiguous");
  check(out.size(1) == expert_rows.size(1) && out.scalar_type() == expert_rows.scalar_type(), kOp,
        "out and expert_rows differ in size or dtype");
  check(weights.dim() == 2 && weights.size(0) == out.size(0) && rows.numel() == weights.numel(),
        kOp, "weights must be [num_tokens, k], and rows have as many elements");
  check_same_device(kOp, out, expert_rows, rows, weights);
  CombineExpertsParams params{};
  params.out = out.mutable_data_ptr();
  params.expert_rows = expert_rows.const_data_ptr();
  params.rows = int32_data(rows, kOp, "rows");
  params.weights = float_data(weights, kOp, "weights");
  params.out_stride = out.stride(0);
  params.expert_rows_stride = expert_rows.stride(0);
  params.num_tokens = static_cast<int32_t>(out.size(0));
  params.num_rows = static_cast<int32_t>(expert_rows.size(0));
  params.size = static_cast<int32_t>(out.size(1));
  params.k = static_cast<int32_t>(weights.size(1));
  params.dtype = float_dtype(out, kOp);
  params.stream = stream;
  kKernel(params);
}

STABLE_TORCH_LIBRARY_FRAGMENT(VL_OPS, m) {
  m.def(
      "route_experts(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, bool renormalize, "
      "int stream) -> ()");
  m.def(
      "permute_tokens(Tensor ids, Tensor(a!) order, Tensor(b!) rows, Tensor(c!) expert_start, "
      "int stream) -> ()");
  m.def("gather_rows(Tensor(a!) out, Tensor input, Tensor order, int k, int stream) -> ()");
  m.def(
      "combine_experts(Tensor(a!) out, Tensor expert_rows, Tensor rows, Tensor weights, "
      "int stream) -> ()");
}

#define VL_MOE_OPS(back_end)                                                       \
  m.impl("route_experts", TORCH_BOX(&route_experts<route_experts_##back_end>));    \
  m.impl("permute_tokens", TORCH_BOX(&permute_tokens<permute_tokens_##back_end>)); \
  m.impl("gather_rows", TORCH_BOX(&gather_rows<gather_rows_##back_end>));          \
  m.impl("combine_experts", TORCH_BOX(&combine_experts<combine_experts_##back_end>));
VL_IMPLEMENT_OPS(VL_MOE_OPS)

}  // namespace
}  // namespace vllm_lite
