// Prompt look-up: a guess of a sequence's next tokens from what it has said before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"

namespace vllm_lite {

// Lengths of the n-grams that are looked for.
struct NgramConfig {
  int32_t prompt_lookup_min = 1;
  int32_t prompt_lookup_max = 1;
};
constexpr int32_t kMaxPromptLookup = 64;

// Throws Error unless 1 <= prompt_lookup_min <= prompt_lookup_max <= kMaxPromptLookup.
void check_ngram(const NgramConfig& config);

// `drafts` becomes the `num_drafts` tokens that followed the last time upon the longest n-gram that
// the sequence ends with; where they would lead past its end, they go on with the drafts
// themselves, as a repetition does. Empty if there is no such n-gram. O(tokens), times
// prompt_lookup_max at worst.
void propose_ngram(const NgramConfig& config, std::span<const TokenId> tokens, size_t num_drafts,
                   std::vector<TokenId>& drafts);

}  // namespace vllm_lite
