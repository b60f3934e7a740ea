// The engine core's outbox for one client: a growing msgpack message that the client takes whole.
//
// A message is [outputs, stats]. Steps that pass before the client takes it are added to the same
// message, so a slow client gets fewer, longer ones. An output is
//   [key, sample_index, token_ids, text, finish_reason, stop_reason, logprobs, num_cached_tokens,
//   message(, prompt_logprobs, vector)]
// with what is new since the sequence's last output; finish_reason is nil or "stop", "length",
// "error", "impossible" (an error that is the request's own), "queue_full" or "refused";
// stop_reason is nil, a token id or the stop string; logprobs is nil or a list of [logprob, rank,
// top_ids, top_logprobs], one per token id; message is nil or why the request failed. The last two
// are there only with a sequence's first output, if that has any: prompt_logprobs is a list like
// logprobs, of the prompt's tokens from the first one asked for; vector is the bytes of float32s,
// or nil.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"

namespace vllm_lite {

struct TokenLogprobs {
  float logprob;
  int32_t rank;
  std::span<const TokenId> top_ids;
  std::span<const float> top_logprobs;
};

// What the prompt's tokens have of log-probabilities, `num_top` of the likeliest with each.
struct PromptLogprobs {
  size_t num_top = 0;
  std::vector<float> logprobs;
  std::vector<int32_t> ranks;
  std::vector<TokenId> top_ids;
  std::vector<float> top_logprobs;
};

struct SequenceOutput {
  RequestKey key = 0;
  int32_t sample_index = 0;
  TokenId token = -1;  // -1: none
  std::string_view text;
  std::string_view finish_reason;  // empty: not finished
  TokenId stop_token = -1;
  std::string_view stop_string;
  const TokenLogprobs* logprobs = nullptr;  // of `token`
  int32_t num_cached_tokens = 0;
  std::string_view message;
  const PromptLogprobs* prompt_logprobs = nullptr;
  std::span<const float> vector;
};

struct EngineStats {
  int64_t num_running = 0;
  int64_t num_waiting = 0;
  int64_t kv_used_blocks = 0;
  int64_t kv_total_blocks = 0;
  int64_t prefix_queries = 0;
  int64_t prefix_hits = 0;
  int64_t num_preemptions = 0;
  int64_t num_steps = 0;
  int64_t num_drafts = 0;  // of sequences' steps, those in which drafts were verified
  int64_t num_draft_tokens = 0;
  int64_t num_accepted_tokens = 0;
};

class OutputWriter {
 public:
  OutputWriter() { clear(); }
  void add(const SequenceOutput& output);
  // Takes over all that `later` holds, behind what is here; `later` is empty then.
  void append(OutputWriter& later);
  bool empty() const { return num_outputs_ == 0; }
  // The finished message. The writer starts a new one, with room for one as long.
  std::string take(const EngineStats& stats);

 private:
  void clear();

  std::string buffer_;
  uint32_t num_outputs_ = 0;
};

}  // namespace vllm_lite
