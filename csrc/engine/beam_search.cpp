#include "engine/beam_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/check.h"

namespace vllm_lite {
namespace {

constexpr int32_t kPrompt = -1;  // the node of the beam without tokens

}  // namespace

BeamSearch::BeamSearch(const BeamSearchParams& params, int32_t max_tokens,
                       std::vector<TokenId> stop_ids)
    : params_(params), max_tokens_(max_tokens), stop_ids_(std::move(stop_ids)) {
  VL_ASSERT(params.width >= 1 && max_tokens >= 1);
  restart();
}

void BeamSearch::restart() {
  length_ = 0;
  nodes_.clear();
  hypotheses_.clear();
  beams_.assign(1, {.parent = 0, .token = -1});
  beam_nodes_.assign(1, kPrompt);
}

void BeamSearch::advance(std::span<const Continuations> after) {
  VL_ASSERT(!done() && after.size() == beams_.size());
  candidates_.clear();
  for (size_t beam = 0; beam < after.size(); ++beam) {
    const int32_t node = beam_nodes_[beam];
    const double sum = node == kPrompt ? 0.0 : nodes_[static_cast<size_t>(node)].sum;
    for (size_t i = 0; i < after[beam].token_ids.size(); ++i) {
      const float logprob = after[beam].logprobs[i];
      if (after[beam].token_ids[i] < 0 || !std::isfinite(logprob)) continue;
      candidates_.push_back({.sum = sum + double{logprob},
                             .beam = static_cast<int32_t>(beam),
                             .place = static_cast<int32_t>(i)});
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    if (a.sum != b.sum) return a.sum > b.sum;
    return a.beam != b.beam ? a.beam < b.beam : a.place < b.place;
  });

  ++length_;
  beams_.clear();
  next_nodes_.clear();
  const auto width = static_cast<size_t>(params_.width);
  for (size_t i = 0; i < candidates_.size(); ++i) {
    if (i >= width && beams_.size() == width) break;
    const Candidate& candidate = candidates_[i];
    const Continuations& list = after[static_cast<size_t>(candidate.beam)];
    const auto place = static_cast<size_t>(candidate.place);
    const TokenId token = list.token_ids[place];
    const bool ends = length_ == max_tokens_ || is_stop(token);
    if (ends ? i >= width : beams_.size() == width) continue;
    const auto node = static_cast<int32_t>(nodes_.size());
    nodes_.push_back({.parent = beam_nodes_[static_cast<size_t>(candidate.beam)],
                      .token = {token, candidate.place + 1, list.logprobs[place]},
                      .sum = candidate.sum});
    if (ends) {
      finish(node);
    } else {
      beams_.push_back({.parent = candidate.beam, .token = token});
      next_nodes_.push_back(node);
    }
  }
  beam_nodes_.swap(next_nodes_);
  if (beams_.empty()) return;
  const double best_sum = nodes_[static_cast<size_t>(beam_nodes_.front())].sum;
  if (hypotheses_.size() == width && !can_improve(best_sum)) beams_.clear();
}

bool BeamSearch::is_stop(TokenId token) const {
  return std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
}

void BeamSearch::finish(int32_t node) {
  const double score =
      nodes_[static_cast<size_t>(node)].sum / std::pow(length_, params_.length_penalty);
  const auto after = std::find_if(hypotheses_.begin(), hypotheses_.end(),
                                  [score](const Hypothesis& other) { return score > other.score; });
  hypotheses_.insert(after, {.score = score, .node = node});
  if (hypotheses_.size() > static_cast<size_t>(params_.width)) hypotheses_.pop_back();
}

// Whether a beam can still become one of the hypotheses, of which there are `width`, as
// early_stopping judges that.
bool BeamSearch::can_improve(double best_sum) const {
  if (params_.early_stopping == EarlyStopping::kYes) return false;
  const bool looks_ahead =
      params_.early_stopping == EarlyStopping::kNever && params_.length_penalty > 0;
  const int32_t length = looks_ahead ? max_tokens_ : length_;
  return best_sum / std::pow(length, params_.length_penalty) > hypotheses_.back().score;
}

bool BeamSearch::ends_with_stop(int32_t i) const {
  return is_stop(nodes_[static_cast<size_t>(hypotheses_[static_cast<size_t>(i)].node)].token.id);
}

void BeamSearch::tokens(int32_t i, std::vector<Token>& out) const {
  out.clear();
  int32_t node = hypotheses_[static_cast<size_t>(i)].node;
  for (; node != kPrompt; node = nodes_[static_cast<size_t>(node)].parent) {
    out.push_back(nodes_[static_cast<size_t>(node)].token);
  }
  std::reverse(out.begin(), out.end());
}

}  // namespace vllm_lite
