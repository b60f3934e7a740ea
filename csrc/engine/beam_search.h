// Beam search over token sequences: which beams go on after a step, and which sequences are the
// result. It knows token ids and log-probabilities alone, neither blocks nor rows.
//
// The same search as transformers' generate(num_beams=width, do_sample=False):
//   - a beam's sum is that of its tokens' log-probabilities; candidates are all beams' next tokens
//     in order of their sums;
//   - a candidate that ends, by a stop token or by the length, becomes a hypothesis if it is among
//     the first `width`; the `width` best hypotheses are kept;
//   - the first `width` candidates that do not end are the beams of the next step;
//   - a hypothesis' score is sum / length ^ length_penalty, where the length counts its output
//     tokens, the stop token among them.
// Equal sums are ordered by the beam's place, then by the place in its list of tokens; an equal
// score does not push out an earlier hypothesis.
//
// The search ends when every candidate ended, or when there are `width` hypotheses and
//   early_stopping kYes:    at once;
//   early_stopping kNo:     no beam beats the worst of them, at the length that it has;
//   early_stopping kNever:  nor at max_tokens, if length_penalty is above 0: only then is the best
//                           score of a longer sequence bounded by that length.
//
// Cost: O(width * list * log) a step. Tokens are kept as a tree, 24 bytes for each beam and step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"

namespace vllm_lite {

enum class EarlyStopping : uint8_t { kNo, kYes, kNever };

struct BeamSearchParams {
  int32_t width = 0;  // beams, and sequences of the result; 0: no beam search
  double length_penalty = 1.0;
  EarlyStopping early_stopping = EarlyStopping::kNo;
};

class BeamSearch {
 public:
  // The likeliest tokens after a beam, likeliest first; negative ids are padding. The search is
  // exact if there are as many as `width` and stop ids together, or the whole vocabulary.
  struct Continuations {
    std::span<const TokenId> token_ids;
    std::span<const float> logprobs;
  };
  struct Beam {
    int32_t parent;  // its beam's place among those before the step
    TokenId token;   // the last
  };
  struct Token {
    TokenId id;
    int32_t rank;  // 1: the likeliest after its beam
    float logprob;
  };

  // REQUIRES: width >= 1, max_tokens >= 1.
  BeamSearch(const BeamSearchParams& params, int32_t max_tokens, std::vector<TokenId> stop_ids);

  // Back to the one beam that has no tokens.
  void restart();

  // One step: `after` has an entry for each beam. REQUIRES: !done().
  void advance(std::span<const Continuations> after);

  // The beams of the next step, the best first. Empty when the search is done.
  std::span<const Beam> beams() const { return beams_; }
  bool done() const { return beams_.empty(); }
  int32_t width() const { return params_.width; }

  // Hypotheses, the best first. Fewer than `width` only if so many sequences do not exist.
  int32_t num_hypotheses() const { return static_cast<int32_t>(hypotheses_.size()); }
  bool ends_with_stop(int32_t i) const;
  double score(int32_t i) const { return hypotheses_[static_cast<size_t>(i)].score; }
  void tokens(int32_t i, std::vector<Token>& out) const;

 private:
  struct Node {
    int32_t parent;  // -1: the prompt
    Token token;
    double sum;
  };
  struct Candidate {
    double sum;
    int32_t beam;
    int32_t place;  // in the beam's list
  };
  struct Hypothesis {
    double score;
    int32_t node;
  };

  bool is_stop(TokenId token) const;
  void finish(int32_t node);
  bool can_improve(double best_sum) const;

  BeamSearchParams params_;
  int32_t max_tokens_;
  std::vector<TokenId> stop_ids_;
  int32_t length_ = 0;       // tokens of every beam
  std::vector<Node> nodes_;  // of all beams so far
  std::vector<Beam> beams_;
  std::vector<int32_t> beam_nodes_;     // of beams_
  std::vector<Hypothesis> hypotheses_;  // best first
  std::vector<int32_t> next_nodes_;     // scratch
  std::vector<Candidate> candidates_;   // scratch
};

}  // namespace vllm_lite
