#include "scheduler/step_plan.h"

#include "core/check.h"

namespace vllm_lite {
namespace {

constexpr int64_t kResultHeaderWords = sizeof(ResultHeader) / sizeof(int32_t);

}  // namespace

StepResultView::StepResultView(std::span<const int32_t> words) {
  const auto size = static_cast<int64_t>(words.size());
  VL_ASSERT(size >= kResultHeaderWords);
  header_ = reinterpret_cast<const ResultHeader*>(words.data());
  const ResultHeader& h = *header_;
  VL_ASSERT(h.magic == kResultMagic);
  VL_ASSERT(h.num_words == size);
  VL_ASSERT(h.num_logits >= 0 && h.max_logprobs >= -1 && h.message_bytes >= 0);

  // Each count is below 2^31 and its section is compared with what is left before the next, so that
  // no sum or product can overflow 64 bits.
  const int64_t n = h.num_logits;
  const int64_t num_top = h.max_logprobs > 0 ? n * h.max_logprobs : 0;
  const int64_t message_words = (int64_t{h.message_bytes} + 3) / 4;
  int64_t left = size - kResultHeaderWords;
  VL_ASSERT(n <= left && num_top <= left && message_words <= left);
  left -= n + message_words + (h.max_logprobs >= 0 ? 2 * n + 2 * num_top : 0);
  VL_ASSERT(left == 0);

  const int32_t* at = words.data() + kResultHeaderWords;
  const auto ints = [&at](int64_t count) {
    const std::span<const int32_t> section(at, static_cast<size_t>(count));
    at += count;
    return section;
  };
  const auto floats = [&at](int64_t count) {
    const std::span<const float> section(reinterpret_cast<const float*>(at),
                                         static_cast<size_t>(count));
    at += count;
    return section;
  };
  token_ids_ = ints(n);
  if (h.max_logprobs >= 0) {
    logprobs_ = floats(n);
    ranks_ = ints(n);
    top_ids_ = ints(num_top);
    top_logprobs_ = floats(num_top);
  }
  message_ = {reinterpret_cast<const char*>(at), static_cast<size_t>(h.message_bytes)};
}

std::span<const TokenId> StepResultView::top_ids(int32_t row) const {
  VL_ASSERT(row >= 0 && row < header_->num_logits);
  if (top_ids_.empty()) return {};
  const auto width = static_cast<size_t>(header_->max_logprobs);
  return top_ids_.subspan(static_cast<size_t>(row) * width, width);
}

std::span<const float> StepResultView::top_logprobs(int32_t row) const {
  VL_ASSERT(row >= 0 && row < header_->num_logits);
  if (top_logprobs_.empty()) return {};
  const auto width = static_cast<size_t>(header_->max_logprobs);
  return top_logprobs_.subspan(static_cast<size_t>(row) * width, width);
}

}  // namespace vllm_lite
