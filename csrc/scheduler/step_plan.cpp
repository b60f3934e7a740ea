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
  VL_ASSERT(h.num_scored >= 0 && h.max_prompt_logprobs >= 0 && h.num_vectors >= 0 &&
            h.vector_size >= 0);

  // Each count is below 2^31 and its section is compared with what is left before the next, so that
  // no sum or product can overflow 64 bits.
  const int64_t n = h.num_logits;
  const int64_t num_top = h.max_logprobs > 0 ? n * h.max_logprobs : 0;
  const int64_t message_words = (int64_t{h.message_bytes} + 3) / 4;
  const int64_t num_scored = h.num_scored;
  const int64_t num_scored_top = num_scored * h.max_prompt_logprobs;
  const int64_t vector_words = int64_t{h.num_vectors} * h.vector_size;
  int64_t left = size - kResultHeaderWords;
  VL_ASSERT(n <= left && num_top <= left && message_words <= left);
  VL_ASSERT(num_scored <= left && num_scored_top <= left && vector_words <= left);
  left -= n + message_words + (h.max_logprobs >= 0 ? 2 * n + 2 * num_top : 0);
  left -= 2 * num_scored + 2 * num_scored_top + vector_words;
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
  const auto sections = [&](int64_t count, int64_t count_top, int32_t width) {
    LogprobSections read;
    read.logprobs = floats(count);
    read.ranks = ints(count);
    read.top_ids = ints(count_top);
    read.top_logprobs = floats(count_top);
    read.width = static_cast<size_t>(width);
    return read;
  };
  token_ids_ = ints(n);
  if (h.max_logprobs >= 0) sampled_ = sections(n, num_top, h.max_logprobs);
  scored_ = sections(num_scored, num_scored_top, h.max_prompt_logprobs);
  vectors_ = floats(vector_words);
  message_ = {reinterpret_cast<const char*>(at), static_cast<size_t>(h.message_bytes)};
}

std::span<const TokenId> StepResultView::top_ids(int32_t row) const {
  VL_ASSERT(row >= 0 && row < header_->num_logits);
  const size_t width = sampled_.width;
  return sampled_.top_ids.subspan(static_cast<size_t>(row) * width, width);
}

std::span<const float> StepResultView::top_logprobs(int32_t row) const {
  VL_ASSERT(row >= 0 && row < header_->num_logits);
  const size_t width = sampled_.width;
  return sampled_.top_logprobs.subspan(static_cast<size_t>(row) * width, width);
}

std::span<const float> StepResultView::vector(int32_t index) const {
  VL_ASSERT(index >= 0 && index < header_->num_vectors);
  const auto size = static_cast<size_t>(header_->vector_size);
  return vectors_.subspan(static_cast<size_t>(index) * size, size);
}

}  // namespace vllm_lite
