// What a step plan (scheduler/step_plan.h) says of the forward pass, into the worker's tensors.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "bindings/op_args.h"
#include "scheduler/step_plan.h"

namespace vllm_lite {
namespace {

// Sections of `inputs`, in this order: plan_words words that are left alone, slot_mapping [2 *
// num_tokens], token_ids and positions [num_tokens], query_start [num_seqs + 1], seq_lens and rows
// [num_seqs], logits_indices, sample_rows and sample_positions [num_logits].
struct Sizes {
  int64_t plan_words, num_tokens, num_seqs, num_logits;

  int64_t num_words() const {
    return plan_words + 4 * num_tokens + 3 * num_seqs + 1 + 3 * num_logits;
  }
};

// Copies section after section, each into its place of the largest step.
class Loader {
 public:
  Loader(const int32_t* plan, int32_t* inputs, bool pad) : from_(plan), to_(inputs), pad_(pad) {}

  // `count` words of `capacity`; the rest becomes `padding`.
  std::span<const int32_t> copy(int64_t count, int64_t capacity, int32_t padding) {
    std::memcpy(to_, from_, static_cast<size_t>(count) * sizeof(int32_t));
    std::span<const int32_t> copied(from_, static_cast<size_t>(count));
    from_ += count;
    end_section(count, capacity, padding);
    return copied;
  }
  // The next section, `count` words of it from get(i).
  template <typename Get>
  void fill(int64_t count, int64_t capacity, const Get& get) {
    for (int64_t i = 0; i < count; ++i) to_[i] = get(i);
    end_section(count, capacity, 0);
  }

 private:
  void end_section(int64_t count, int64_t capacity, int32_t padding) {
    if (pad_) std::fill(to_ + count, to_ + capacity, padding);
    to_ += capacity;
  }

  const int32_t* from_;
  int32_t* to_;
  bool pad_;
};

void load_step(Tensor plan, Tensor inputs, int64_t plan_words, int64_t num_tokens, int64_t num_seqs,
               int64_t num_logits, bool pad) {
  constexpr const char* kOp = "load_step";
  const int32_t* words = int32_data(plan, kOp, "plan");
  int32_t* to = int32_data(inputs, kOp, "inputs");
  const Sizes sizes{plan_words, num_tokens, num_seqs, num_logits};
  check(plan_words >= 0 && num_tokens >= 0 && num_seqs >= 0 && num_logits >= 0 &&
            inputs.numel() == sizes.num_words(),
        kOp, "inputs has another number of words than the sizes say");
  PlanHeader header;
  check(plan.numel() * 4 >= static_cast<int64_t>(sizeof(header)), kOp, "plan is too short");
  std::memcpy(&header, words, sizeof(header));
  const int64_t tokens = header.num_tokens, seqs = header.num_seqs, logits = header.num_logits;
  check(header.magic == kPlanMagic && header.num_words == plan.numel(), kOp,
        "plan is not a step plan");
  check(tokens >= 0 && tokens <= num_tokens && seqs >= 0 && seqs <= num_seqs && logits >= 0 &&
            logits <= num_logits &&
            kPlanHeaderWords + 4 * tokens + 3 * seqs + 1 + logits <=
                static_cast<int64_t>(header.num_words),
        kOp, "plan is larger than inputs, or than itself");
  Loader loader(words + kPlanHeaderWords, to + plan_words, pad);
  loader.copy(2 * tokens, 2 * num_tokens, -1);
  loader.copy(tokens, num_tokens, 0);
  const auto positions = loader.copy(tokens, num_tokens, 0);
  const auto query_start = loader.copy(seqs + 1, num_seqs + 1, static_cast<int32_t>(tokens));
  loader.copy(seqs, num_seqs, 0);  // seq_lens
  const auto rows = loader.copy(seqs, num_seqs, 0);
  const auto indices = loader.copy(logits, num_logits, 0);
  loader.fill(logits, num_logits, [&](int64_t i) {
    const auto after =
        std::upper_bound(query_start.begin(), query_start.end(), indices[static_cast<size_t>(i)]);
    const auto found = after - query_start.begin() - 1;
    check(found >= 0 && found < seqs, kOp, "a logits index is of no sequence");
    return rows[static_cast<size_t>(found)];
  });
  // Of the tokens that are sampled: those after the tokens at the logits.
  loader.fill(logits, num_logits, [&](int64_t i) {
    return positions[static_cast<size_t>(indices[static_cast<size_t>(i)])] + 1;
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_lite, m) {
  m.def(
      "load_step(Tensor plan, Tensor(a!) inputs, int plan_words, int num_tokens, int num_seqs, "
      "int num_logits, bool pad) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CPU, m) { m.impl("load_step", TORCH_BOX(&load_step)); }

}  // namespace
}  // namespace vllm_lite
