// What the engine core keeps of a request: its sequences, and what turns their tokens into text.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_core.h"

namespace vllm_lite {

// A sequence with what turns its tokens into text.
struct EngineCore::Stream : Sequence {
  Stream(Request& owner_request, const TokenTable& table,
         std::shared_ptr<const StopAutomaton> automaton);

  // Takes in the next token, with which the sequence has num_tokens; `hidden`: as if it had no
  // text; `ends`: it is the sequence's last. `text` becomes what may be shown of it. Returns the
  // index of the stop string that it completes, or -1. `piece` is scratch.
  int32_t show(TokenId token, int32_t num_tokens, bool hidden, bool ends, std::string& text,
               std::string& piece);

  Request& owner;
  SamplingParams sampling_params;  // the request's, with this sample's seed
  Detokenizer detokenizer;
  StopMatcher matcher;
  PromptLogprobs prompt_logprobs;  // of as many tokens as results have come for
  int32_t num_drafts = 0;          // that are worth a try
};

struct EngineCore::Request {
  explicit Request(RequestInput given) : input(std::move(given)) {}

  RequestInput input;
  // Kept until all are finished: samples fork the first, the scheduler holds pointers.
  std::vector<std::unique_ptr<Stream>> streams;
  int32_t num_unfinished = 0;  // a beam search counts as one: its first stream answers for it
  std::optional<BeamSearch> search;
  BeamGroup beams;  // the streams, if there is a search
};

}  // namespace vllm_lite
