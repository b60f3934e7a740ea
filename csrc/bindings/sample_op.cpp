// Sampling for Python.
#include "bindings/back_ends.h"
#include "bindings/op_args.h"
#include "ops/ops.h"
#include "ops/sample_workspace.h"

namespace vllm_lite {
namespace {

template <void (*kKernel)(const SampleParams&)>
void sample(Tensor logits, Tensor rows, Tensor positions, Tensor row_state, OptionalTensor id_lists,
            OptionalTensor output_counts, OptionalTensor prompt_mask, OptionalTensor token_masks,
            OptionalTensor mask_index, Tensor token_ids, OptionalTensor logprobs,
            OptionalTensor ranks, OptionalTensor top_ids, OptionalTensor top_logprobs,
            OptionalTensor workspace, OptionalTensor last_tokens, int64_t stream) {
  constexpr const char* kOp = "sample";
  check(logits.dim() == 2 && logits.stride(1) == 1 && logits.scalar_type() == ScalarType::Float,
        kOp, "logits must be float32 [num_rows, vocab_size]");
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  check(rows.numel() == num_rows && positions.numel() == num_rows && token_ids.numel() == num_rows,
        kOp, "rows, positions and token_ids must be [num_rows]");
  check(row_state.dim() == 2 && row_state.size(1) == kRowStateWords, kOp,
        "row_state must be [max_rows, 16]");
  const int64_t max_rows = row_state.size(0);
  check(!id_lists || (id_lists->dim() == 2 && id_lists->size(0) == max_rows), kOp,
        "id_lists must be [max_rows, words]");
  check(output_counts.has_value() == prompt_mask.has_value(), kOp,
        "output_counts and prompt_mask come together");
  check(!output_counts || (output_counts->numel() == max_rows * vocab_size &&
                           prompt_mask->numel() == max_rows * vocab_size),
        kOp, "output_counts and prompt_mask must be [max_rows, vocab_size]");
  check(token_masks.has_value() == mask_index.has_value(), kOp,
        "token_masks and mask_index come together");
  check(
      !token_masks || (token_masks->dim() == 2 && token_masks->size(1) == (vocab_size + 31) / 32 &&
                       mask_index->numel() == num_rows),
      kOp, "token_masks must be [num_masks, ceil(vocab_size / 32)], mask_index [num_rows]");
  check(
      top_ids.has_value() == top_logprobs.has_value() && logprobs.has_value() == ranks.has_value(),
      kOp, "top_ids and top_logprobs, logprobs and ranks come together");
  check_same_device(kOp, logits, rows, positions, row_state, id_lists, output_counts, prompt_mask,
                    token_masks, mask_index, token_ids, logprobs, ranks, top_ids, top_logprobs,
                    workspace, last_tokens);
  check(!last_tokens || last_tokens->numel() == max_rows, kOp, "last_tokens must be [max_rows]");
  SampleParams params{};
  params.logits = static_cast<const float*>(logits.const_data_ptr());
  params.logits_stride = logits.stride(0);
  params.rows = int32_data(rows, kOp, "rows");
  params.positions = int32_data(positions, kOp, "positions");
  params.row_state = reinterpret_cast<const RowState*>(int32_data(row_state, kOp, "row_state"));
  params.id_lists = int32_data(id_lists, kOp, "id_lists");
  params.id_lists_stride = id_lists ? id_lists->size(1) : 0;
  params.output_counts = int32_data(output_counts, kOp, "output_counts");
  params.prompt_mask = byte_data(prompt_mask, kOp, "prompt_mask");
  params.token_masks = int32_data(token_masks, kOp, "token_masks");
  params.mask_index = int32_data(mask_index, kOp, "mask_index");
  params.num_masks = token_masks ? static_cast<int32_t>(token_masks->size(0)) : 0;
  params.token_ids = int32_data(token_ids, kOp, "token_ids");
  params.last_tokens = int32_data(last_tokens, kOp, "last_tokens");
  params.logprobs = float_data(logprobs, kOp, "logprobs");
  params.ranks = int32_data(ranks, kOp, "ranks");
  params.top_ids = int32_data(top_ids, kOp, "top_ids");
  params.top_logprobs = float_data(top_logprobs, kOp, "top_logprobs");
  params.workspace = byte_data(workspace, kOp, "workspace");
  params.workspace_bytes = workspace ? workspace->numel() : 0;
  params.num_rows = static_cast<int32_t>(num_rows);
  params.vocab_size = static_cast<int32_t>(vocab_size);
  params.max_rows = static_cast<int32_t>(max_rows);
  params.max_logprobs = top_ids ? static_cast<int32_t>(top_ids->size(1)) : 0;
  params.stream = stream;
  kKernel(params);
}

int64_t sample_workspace_bytes(int64_t num_rows, int64_t vocab_size) {
  return SampleWorkspace(nullptr, num_rows, vocab_size).num_bytes;
}

STABLE_TORCH_LIBRARY_FRAGMENT(VL_OPS, m) {
  m.def(
      "sample(Tensor logits, Tensor rows, Tensor positions, Tensor row_state, Tensor? id_lists, "
      "Tensor(a!)? output_counts, Tensor? prompt_mask, Tensor? token_masks, Tensor? mask_index, "
      "Tensor(b!) token_ids, "
      "Tensor(c!)? logprobs, Tensor(d!)? ranks, Tensor(e!)? top_ids, Tensor(f!)? top_logprobs, "
      "Tensor(g!)? workspace, Tensor(h!)? last_tokens, int stream) -> ()");
  m.def("sample_workspace_bytes(int num_rows, int vocab_size) -> int");
}

#define VL_SAMPLE_OPS(back_end) m.impl("sample", TORCH_BOX(&sample<sample_##back_end>));
VL_IMPLEMENT_OPS(VL_SAMPLE_OPS)

STABLE_TORCH_LIBRARY_IMPL(VL_OPS, CompositeExplicitAutograd, m) {
  m.impl("sample_workspace_bytes", TORCH_BOX(&sample_workspace_bytes));
}

}  // namespace
}  // namespace vllm_lite
