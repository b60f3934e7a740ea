#include "engine/ngram_proposer.h"

#include <algorithm>
#include <string>

#include "core/check.h"

namespace vllm_lite {
namespace {

// How many tokens, at most `most`, are the same before `a` and before `b`. REQUIRES: a < b.
size_t common_length(std::span<const TokenId> tokens, size_t a, size_t b, size_t most) {
  const size_t limit = std::min(a, most);
  size_t length = 0;
  while (length < limit && tokens[a - 1 - length] == tokens[b - 1 - length]) ++length;
  return length;
}

}  // namespace

void check_ngram(const NgramConfig& config) {
  const int32_t min = config.prompt_lookup_min, max = config.prompt_lookup_max;
  VL_CHECK(min >= 1 && min <= max && max <= kMaxPromptLookup,
           "prompt_lookup_min is " + std::to_string(min) + " and prompt_lookup_max " +
               std::to_string(max) + ", but they must be from 1 to " +
               std::to_string(kMaxPromptLookup) + ", the first not above the second");
}

void propose_ngram(const NgramConfig& config, std::span<const TokenId> tokens, size_t num_drafts,
                   std::vector<TokenId>& drafts) {
  drafts.clear();
  const size_t size = tokens.size();
  const auto most = static_cast<size_t>(config.prompt_lookup_max);
  size_t longest = static_cast<size_t>(config.prompt_lookup_min) - 1;
  size_t source = 0;  // where the drafts begin; 0: nowhere
  for (size_t end = size; end > longest + 1 && longest < most;) {
    --end;
    if (tokens[end - 1] != tokens[size - 1]) continue;
    const size_t length = common_length(tokens, end, size, most);
    if (length <= longest) continue;
    longest = length;
    source = end;
  }
  if (source == 0) return;
  for (size_t i = source; drafts.size() < num_drafts; ++i) {
    drafts.push_back(i < size ? tokens[i] : drafts[i - size]);
  }
}

}  // namespace vllm_lite
