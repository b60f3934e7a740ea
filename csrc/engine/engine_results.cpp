// What a step's result means for the requests: their outputs, and who goes on.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "engine/engine_request.h"
#include "engine/utf8.h"

namespace vllm_lite {
namespace {

constexpr std::string_view kNoLogits = "the model gave no finite logits to sample from";
// The reason where it is the request that could not be fulfilled.
constexpr std::string_view kImpossible = "impossible";

bool contains(const std::vector<TokenId>& ids, TokenId id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

int32_t EngineCore::Stream::show(TokenId token, int32_t num_tokens, bool hidden, bool ends,
                                 std::string& text, std::string& piece) {
  text.clear();
  piece.clear();
  if (!hidden) detokenizer.append(token, piece);
  if (ends) detokenizer.finish(piece);
  if (num_tokens - num_prompt_tokens < owner.input.min_tokens) {
    matcher.pass(piece, text);
    if (ends) matcher.finish(text);
    return -1;
  }
  const int32_t stop = matcher.append(piece, text);
  if (stop >= 0 || owner.input.stops.empty()) return stop;
  if (ends) {
    matcher.finish(text);
    return -1;
  }
  // Bytes still held because later tokens may change them count as they would stand at the end,
  // unless they are a character that is still being written.
  piece.clear();
  detokenizer.preview_tail(piece);
  if (piece.empty() || piece.find(kReplacementCharacter) != std::string::npos) return -1;
  return matcher.would_match(piece) < 0 ? -1 : matcher.append(piece, text);
}

void EngineCore::finish_step(std::span<const int32_t> words) {
  VL_ASSERT(num_outstanding() > 0);
  const bool was_cancelled = num_outstanding() > scheduler_.num_in_flight();
  std::optional<StepResultView> view;
  try {
    view.emplace(words);
    VL_ASSERT(view->step() == result_id_ + 1);
    if (!was_cancelled) check_result(*view);
  } catch (const InternalError& error) {
    fail_step(std::string("the worker's answer is no result of this step: ") + error.what());
    throw;
  }
  ++result_id_;
  if (was_cancelled) return;
  const StepResultView& result = *view;
  if (result.header().error != 0) {
    fail_in_flight({result.message().data(), result.message().size()});
    return;
  }
  const Step& step = scheduler_.step_in_flight(0);
  scheduler_.commit(result.token_ids());
  if (step.num_scored > 0) absorb_scores(step, result);
  int32_t row = -1;  // of the result
  DraftRounds rounds(step);
  int32_t num_vectors = 0;
  for (const ScheduledSequence& part : step.sequences) {
    if (!part.samples) {
      if (!part.ends_prompt()) continue;
      const bool has_vector = part.sequence->pooling != Pooling::kNone;
      const auto vector = has_vector ? result.vector(num_vectors++) : std::span<const float>();
      if (part.sequence->state == SequenceState::kFinished) continue;
      end_prompt(static_cast<Stream&>(*part.sequence), vector);
      continue;
    }
    ++row;
    Stream& stream = static_cast<Stream&>(*part.sequence);
    if (stream.state != SequenceState::kFinished) {
      if (stream.group != nullptr) {
        advance_search(stream, result, row);
      } else {
        absorb_row(stream, result, row, part.first_token + part.num_tokens + 1);
      }
    }
    if (part.num_drafts > 0) absorb_drafts(part, result, rounds);
  }
  if (scheduler_.config().num_speculative_tokens > 0) propose_drafts(step);
  reap();
  publish_outputs();
#if !defined(NDEBUG)
  check_invariants();
#endif
}

// Throws InternalError unless the result has all that the oldest step in flight asked for.
void EngineCore::check_result(const StepResultView& result) const {
  if (result.header().error != 0) return;
  const Step& step = scheduler_.step_in_flight(0);
  VL_ASSERT(result.token_ids().size() == static_cast<size_t>(step.num_logits()));
  for (const TokenId token : result.token_ids()) VL_ASSERT(token >= kAllMasked);
  const ResultHeader& header = result.header();
  VL_ASSERT(header.num_scored == step.num_scored && header.num_vectors == step.num_vectors);
  for (const ScheduledSequence& part : step.sequences) {
    VL_ASSERT(!part.samples || header.max_logprobs >= part.sequence->sampling->row.num_logprobs);
    VL_ASSERT(part.num_scored == 0 ||
              header.max_prompt_logprobs >= part.sequence->num_prompt_logprobs);
  }
}

// `row` of the result is the sequence's next token, with which it has num_tokens.
void EngineCore::absorb_row(Stream& stream, const StepResultView& result, int32_t row,
                            int32_t num_tokens) {
  const auto i = static_cast<size_t>(row);
  const int32_t wanted = stream.sampling_params.row.num_logprobs;
  if (wanted < 0) {
    absorb(stream, result.token_ids()[i], num_tokens, nullptr);
    return;
  }
  // The result is as wide as its widest row.
  const auto count = static_cast<size_t>(wanted);
  const TokenLogprobs logprobs{result.logprobs()[i], result.ranks()[i],
                               result.top_ids(row).first(count),
                               result.top_logprobs(row).first(count)};
  absorb(stream, result.token_ids()[i], num_tokens, &logprobs);
}

// What follows from the drafts that were right.
void EngineCore::absorb_drafts(const ScheduledSequence& part, const StepResultView& result,
                               DraftRounds& rounds) {
  Stream& stream = static_cast<Stream&>(*part.sequence);
  for (int32_t i = 0; i < part.num_drafts; ++i) {
    const int32_t row = rounds.next(i);
    if (i >= part.num_accepted || stream.state == SequenceState::kFinished) continue;
    absorb_row(stream, result, row, part.first_token + part.num_tokens + i + 2);
  }
}

// After a wrong draft only as many as were right before it, or one; twice as many whenever all were
// right. So text that does not repeat itself costs little more than without drafts.
void EngineCore::propose_drafts(const Step& step) {
  const int32_t most = scheduler_.config().num_speculative_tokens;
  // In as full a step none would have room.
  const int32_t max_num_logits = scheduler_.config().max_num_logits;
  if (max_num_logits > 0 && step.num_samples >= max_num_logits) return;
  for (const ScheduledSequence& part : step.sequences) {
    Stream& s = static_cast<Stream&>(*part.sequence);
    if (!part.samples || s.group != nullptr || s.state == SequenceState::kFinished) continue;
    if (part.num_drafts > 0) {
      s.num_drafts = part.num_accepted == part.num_drafts ? std::min(2 * s.num_drafts, most)
                                                          : std::max(1, part.num_accepted);
    }
    propose_ngram(ngram_, s.tokens, static_cast<size_t>(s.num_drafts), s.drafts);
  }
}

void EngineCore::absorb(Stream& stream, TokenId token, int32_t num_tokens,
                        const TokenLogprobs* logprobs) {
  const RequestInput& input = stream.owner.input;
  if (token == kNoToken) {
    end_with_error(stream, kNoLogits);
    return;
  }
  if (token == kAllMasked) {
    end_with_error(stream,
                   "no token is left to choose from: structured_outputs, bad_words, "
                   "allowed_token_ids and min_tokens exclude them all together, or the grammar has "
                   "become too complex at this place",
                   kImpossible);
    return;
  }
  SequenceOutput output;
  output.key = input.key;
  output.sample_index = stream.sample_index;
  output.num_cached_tokens = std::max(stream.num_cached_tokens, 0);
  output.token = token;
  output.logprobs = logprobs;
  add_prompt_logprobs(output, stream, num_tokens);
  const bool is_stop_id = contains(stream.sampling_params.stop_ids, token);
  if (is_stop_id) {
    output.finish_reason = "stop";
    if (!contains(input.eos_ids, token)) output.stop_token = token;
  } else if (num_tokens >= stream.max_total_tokens) {
    output.finish_reason = "length";
  }
  const int32_t stop = stream.show(token, num_tokens, is_stop_id && !input.include_stop_in_output,
                                   !output.finish_reason.empty(), text_, piece_);
  if (stop >= 0) {
    // Its text comes before that of a stop token, and before the limit.
    output.finish_reason = "stop";
    output.stop_token = -1;
    output.stop_string = input.stops[static_cast<size_t>(stop)];
  }
  output.text = text_;
  if (!output.finish_reason.empty()) finish_stream(stream);
  emit(output);
  if (output.prompt_logprobs != nullptr) stream.prompt_logprobs = {};  // they have been told
}

// Keeps what the result says of prompts' tokens. The sequence may have been preempted since: its
// scores are right all the same, and are not computed again.
void EngineCore::absorb_scores(const Step& step, const StepResultView& result) {
  const LogprobSections& scored = result.scored();
  size_t begin = 0;
  for (const ScheduledSequence& part : step.sequences) {
    if (part.num_scored == 0) continue;
    const auto count = static_cast<size_t>(part.num_scored);
    const size_t end = begin + count;
    Stream& stream = static_cast<Stream&>(*part.sequence);
    if (stream.state != SequenceState::kFinished) {
      VL_ASSERT(part.first_scored == stream.score_begin);
      stream.score_begin += part.num_scored;
      PromptLogprobs& kept = stream.prompt_logprobs;
      const auto append = [](auto& to, auto from, size_t at, size_t n) {
        const auto part_of = from.subspan(at, n);
        to.insert(to.end(), part_of.begin(), part_of.end());
      };
      append(kept.logprobs, scored.logprobs, begin, count);
      append(kept.ranks, scored.ranks, begin, count);
      // The result is as wide as its widest row.
      for (size_t i = begin; i < end; ++i) {
        append(kept.top_ids, scored.top_ids, i * scored.width, kept.num_top);
        append(kept.top_logprobs, scored.top_logprobs, i * scored.width, kept.num_top);
      }
      const auto ranks = scored.ranks.subspan(begin, count);
      if (std::find(ranks.begin(), ranks.end(), 0) != ranks.end()) {
        end_with_error(stream, "the model gave no finite logits to score the prompt with");
      }
    }
    begin = end;
  }
}

// The prompt of a sequence that samples nothing is computed.
void EngineCore::end_prompt(Stream& stream, std::span<const float> vector) {
  if (!std::all_of(vector.begin(), vector.end(), [](float x) { return std::isfinite(x); })) {
    end_with_error(stream, "the model gave a vector that is not finite");
    return;
  }
  SequenceOutput output;
  output.key = stream.owner.input.key;
  output.sample_index = stream.sample_index;
  output.num_cached_tokens = std::max(stream.num_cached_tokens, 0);
  output.vector = vector;
  output.finish_reason = stream.pooling == Pooling::kNone ? "length" : "stop";
  add_prompt_logprobs(output, stream, stream.num_tokens());
  finish_stream(stream);
  emit(output);
}

// To a sequence's first output; with it the sequence has num_tokens.
void EngineCore::add_prompt_logprobs(SequenceOutput& output, const Stream& stream,
                                     int32_t num_tokens) const {
  const bool is_first = num_tokens <= stream.num_prompt_tokens + 1;
  if (stream.is_scored() && is_first) output.prompt_logprobs = &stream.prompt_logprobs;
}

// `row` of the result is this beam's. All beams of a search are in the step, one after another:
// once the last is reached, the search goes on.
void EngineCore::advance_search(const Stream& beam, const StepResultView& result, int32_t row) {
  Request& request = beam.owner;
  BeamGroup& group = request.beams;
  if (group.first->state != SequenceState::kRunning) return;  // preempted: it begins again
  if (&beam != group.beams[static_cast<size_t>(group.num_in_use) - 1]) return;
  const auto num_listed = static_cast<size_t>(beam.sampling_params.row.num_logprobs);
  continuations_.clear();
  for (int32_t i = row - group.num_in_use + 1; i <= row; ++i) {
    if (result.token_ids()[static_cast<size_t>(i)] < 0) {
      end_with_error(*request.streams.front(), kNoLogits);
      return;
    }
    continuations_.push_back(
        {result.top_ids(i).first(num_listed), result.top_logprobs(i).first(num_listed)});
  }
  BeamSearch& search = *request.search;
  if (beam.num_output_tokens() == 0) search.restart();  // it may have been preempted
  search.advance(continuations_);
  if (search.done()) {
    finish_search(request);
    return;
  }
  next_beams_.clear();
  for (const BeamSearch::Beam& next : search.beams()) {
    next_beams_.push_back({.parent = next.parent, .token = next.token});
  }
  scheduler_.set_beams(group, next_beams_);
}

void EngineCore::finish_search(Request& request) {
  const BeamSearch& search = *request.search;
  const RequestInput& input = request.input;
  Stream& first = *request.streams.front();
  if (search.num_hypotheses() < search.width()) {
    end_with_error(first,
                   "there are only " + std::to_string(search.num_hypotheses()) +
                       " different sequences, but n is " + std::to_string(search.width()) +
                       ": ask for fewer beams",
                   kImpossible);
    return;
  }
  SequenceOutput output;
  output.key = input.key;
  output.num_cached_tokens = std::max(first.num_cached_tokens, 0);
  for (int32_t i = 0; i < search.num_hypotheses(); ++i) {
    Detokenizer& detokenizer = request.streams[static_cast<size_t>(i)]->detokenizer;
    search.tokens(i, hypothesis_);
    output.sample_index = i;
    output.finish_reason = {};
    output.stop_token = -1;
    for (const BeamSearch::Token& token : hypothesis_) {
      const bool ends = &token == &hypothesis_.back();
      const bool is_stop_id = ends && search.ends_with_stop(i);
      const TokenLogprobs logprobs{token.logprob, token.rank, {}, {}};
      output.token = token.id;
      output.logprobs = &logprobs;
      if (ends) output.finish_reason = is_stop_id ? "stop" : "length";
      if (is_stop_id && !contains(input.eos_ids, token.id)) output.stop_token = token.id;
      text_.clear();
      if (!is_stop_id || input.include_stop_in_output) detokenizer.append(token.id, text_);
      if (ends) detokenizer.finish(text_);
      output.text = text_;
      emit(output);
    }
  }
  finish_stream(first);
}

}  // namespace vllm_lite
