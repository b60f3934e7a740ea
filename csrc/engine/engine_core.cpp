#include "engine/engine_core.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/check.h"
#include "engine/utf8.h"

namespace vllm_lite {
namespace {

constexpr std::string_view kNoLogits = "the model gave no finite logits to sample from";
// The reason where it is the request that could not be fulfilled.
constexpr std::string_view kImpossible = "impossible";

bool contains(const std::vector<TokenId>& ids, TokenId id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

// A message from another program, which may be empty or cut in the middle of a character.
std::string readable(std::string_view message) {
  if (message.empty()) return "the step failed, and the worker did not say why";
  std::string text;
  while (!message.empty()) {
    const Utf8Part part = first_utf8_part(message);
    const bool whole = part.kind == Utf8Part::Kind::kCharacter;
    text.append(whole ? message.substr(0, part.length) : kReplacementCharacter);
    message.remove_prefix(part.length);
  }
  return text;
}

}  // namespace

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

EngineCore::Stream::Stream(Request& owner_request, const TokenTable& table,
                           std::shared_ptr<const StopAutomaton> automaton)
    : owner(owner_request),
      sampling_params(owner.input.sampling),
      detokenizer(table, owner.input.skip_special_tokens),
      matcher(std::move(automaton), owner.input.include_stop_in_output) {
  request = owner.input.key;
  priority = owner.input.priority;
  salt = owner.input.salt;
  sampling = &sampling_params;
}

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

EngineCore::EngineCore(const EngineCoreConfig& config, TokenTable tokens)
    : tokens_(std::move(tokens)),
      cache_(config.cache),
      scheduler_(config.scheduler, cache_),
      builder_(config.scheduler, config.cache.block_size),
      max_outstanding_(config.async_scheduling ? kMaxStepsInFlight : 1),
      ngram_(config.ngram) {
  constexpr int32_t kMaxClients = 1 << (64 - kClientShift);
  VL_CHECK(config.num_clients >= 1 && config.num_clients <= kMaxClients,
           "num_clients is " + std::to_string(config.num_clients) + ", but must be from 1 to " +
               std::to_string(kMaxClients));
  if (config.scheduler.num_speculative_tokens > 0) {
    VL_CHECK(!config.async_scheduling,
             "speculation and asynchronous scheduling exclude each other: what the next step "
             "computes follows from the result of this one");
    check_ngram(config.ngram);
  }
  const auto num_clients = static_cast<size_t>(config.num_clients);
  news_.resize(num_clients);
  outbox_.resize(num_clients);
  stats_changed_.resize(num_clients);
  stats_.kv_total_blocks = cache_.num_blocks();
}

EngineCore::~EngineCore() { stop(); }

// --- inbox -------------------------------------------------------------------------------------

void EngineCore::submit(RequestInput input) {
  VL_CHECK(client_of(input.key) < outbox_.size(),
           "the request's key is of client " + std::to_string(client_of(input.key)) +
               ", but there are only " + std::to_string(outbox_.size()) + " clients");
  VL_CHECK(input.num_samples >= 1,
           "n is " + std::to_string(input.num_samples) + ", but must be at least 1");
  {
    std::lock_guard lock(inbox_mutex_);
    inbox_.emplace_back(std::move(input));
  }
  inbox_filled_.notify_one();
}

void EngineCore::abort(RequestKey key) {
  {
    std::lock_guard lock(inbox_mutex_);
    inbox_.emplace_back(key);
  }
  inbox_filled_.notify_one();
}

// True if there was anything.
bool EngineCore::drain_inbox() {
  {
    std::lock_guard lock(inbox_mutex_);
    draining_.swap(inbox_);
  }
  const bool any = !draining_.empty();
  for (InboxItem& item : draining_) {
    if (auto* input = std::get_if<RequestInput>(&item)) {
      add_request(std::move(*input));
    } else {
      abort_request(std::get<RequestKey>(item));
    }
  }
  draining_.clear();
  return any;
}

void EngineCore::add_request(RequestInput input) {
  const int32_t limit = scheduler_.config().max_num_waiting;
  const int32_t n = input.num_samples;
  if (requests_.contains(input.key)) {
    refuse(input, "refused", "a request with this key is already running");
  } else if (n > limit) {
    refuse(input, "refused",
           "n is " + std::to_string(n) + ", but the waiting queue holds only " +
               std::to_string(limit) + " sequences: ask for fewer or raise max_num_waiting");
  } else if (n > limit - scheduler_.stats().num_waiting) {
    refuse(input, "queue_full",
           "the waiting queue is full (" + std::to_string(limit) + " sequences)");
  } else {
    const RequestKey key = input.key;
    auto owned = std::make_unique<Request>(std::move(input));
    Request& request = *requests_.emplace(key, std::move(owned)).first->second;
    try {
      start(request);
    } catch (const Error& error) {
      refuse(request.input, "refused", error.what());
      requests_.erase(key);
    }
  }
}

// Makes a request's sequences and gives them to the scheduler. Throws Error for what cannot run;
// then the scheduler has none of them: they differ in nothing that it judges.
void EngineCore::start(Request& request) {
  RequestInput& in = request.input;
  VL_CHECK(in.sampling.bias_ids.size() == in.sampling.bias_values.size(),
           "logit_bias has " + std::to_string(in.sampling.bias_ids.size()) + " token ids and " +
               std::to_string(in.sampling.bias_values.size()) + " values");
  VL_CHECK(in.pooling == Pooling::kNone || (in.max_tokens == 0 && in.num_samples == 1),
           "a pooling request has one sample and no output tokens");
  // In 64 bits: "no limit" is the largest int32_t.
  const int64_t num_prompt = static_cast<int64_t>(in.prompt.size());
  const int64_t total =
      std::min<int64_t>(num_prompt + in.max_tokens, scheduler_.config().max_model_len);
  const int64_t min_total = in.min_tokens > 0 ? std::min(num_prompt + in.min_tokens, total) : 0;
  const uint64_t seed =
      uint64_t{in.sampling.row.seed_high} << 32 | uint64_t{in.sampling.row.seed_low};
  const auto automaton = std::make_shared<const StopAutomaton>(in.stops);
  const bool has_search = in.beam_search.width > 0;
  VL_ASSERT(!has_search || (in.num_samples == 1 && in.stops.empty()));
  VL_CHECK(!has_search || in.max_tokens >= 1,
           "max_tokens is " + std::to_string(in.max_tokens) +
               ", but a beam search must look for at least one token");
  const int32_t num_streams = has_search ? in.beam_search.width : in.num_samples;
  for (int32_t i = 0; i < num_streams; ++i) {
    auto& stream =
        request.streams.emplace_back(std::make_unique<Stream>(request, tokens_, automaton));
    stream->sample_index = i;
    if (i == 0 || !has_search) stream->tokens = in.prompt;
    stream->num_prompt_tokens = static_cast<int32_t>(num_prompt);
    stream->max_total_tokens = static_cast<int32_t>(total);
    stream->pooling = in.pooling;
    stream->num_drafts = scheduler_.config().num_speculative_tokens;
    stream->drafts.reserve(static_cast<size_t>(stream->num_drafts));
    if (has_search) {
      stream->group = &request.beams;
      request.beams.beams.push_back(stream.get());
    } else if (i > 0) {
      stream->fork_parent = request.streams.front().get();
    }
    if (i == 0 && in.num_prompt_logprobs >= 0) {
      stream->num_prompt_logprobs = in.num_prompt_logprobs;
      stream->score_begin = std::max(in.prompt_logprobs_start - 1, 0);
      stream->prompt_logprobs.num_top = static_cast<size_t>(in.num_prompt_logprobs);
    }
    RowSampling& row = stream->sampling_params.row;
    row.num_prompt_tokens = static_cast<int32_t>(num_prompt);
    row.min_total_tokens = static_cast<int32_t>(min_total);
    // Beams are one sample: which row one has must not matter.
    const uint64_t own_seed = seed + (has_search ? 0 : static_cast<uint64_t>(i));
    row.seed_low = static_cast<uint32_t>(own_seed);
    row.seed_high = static_cast<uint32_t>(own_seed >> 32);
  }
  in.prompt = {};  // the sequences have it
  request.beams.first = request.streams.front().get();
  for (const auto& stream : request.streams) {
    if (has_search && stream != request.streams.front()) break;
    const AddResult added = scheduler_.add(stream.get());
    VL_ASSERT(added == AddResult::kAdded);
    ++request.num_unfinished;
  }
  if (has_search) {
    request.search.emplace(in.beam_search, static_cast<int32_t>(total - num_prompt),
                           in.sampling.stop_ids);
  }
}

void EngineCore::abort_request(RequestKey key) {
  const auto found = requests_.find(key);
  if (found == requests_.end()) return;
  for (const auto& stream : found->second->streams) {
    if (stream->state != SequenceState::kFinished) finish_stream(*stream);
  }
  reap();
}

void EngineCore::refuse(const RequestInput& input, std::string_view reason,
                        std::string_view message) {
  SequenceOutput output;
  output.key = input.key;
  output.finish_reason = reason;
  output.message = message;
  for (output.sample_index = 0; output.sample_index < input.num_samples; ++output.sample_index) {
    emit(output);
  }
}

void EngineCore::finish_stream(Stream& stream) {
  scheduler_.finish(&stream);
  if (--stream.owner.num_unfinished == 0) finished_.push_back(stream.owner.input.key);
}

// Frees the requests that have finished, but for those that a step in flight points to.
void EngineCore::reap() {
  for (const RequestKey key : finished_) {
    const auto found = requests_.find(key);
    if (in_flight(*found->second)) ended_.push_back(std::move(found->second));
    requests_.erase(found);
  }
  finished_.clear();
  std::erase_if(ended_, [this](const auto& request) { return !in_flight(*request); });
}

bool EngineCore::in_flight(const Request& request) const {
  return std::any_of(request.streams.begin(), request.streams.end(),
                     [this](const auto& stream) { return scheduler_.in_flight(stream.get()); });
}

// --- one step ----------------------------------------------------------------------------------

std::span<const int32_t> EngineCore::begin_step() {
  VL_ASSERT(num_outstanding() < max_outstanding_);
  if (drain_inbox()) publish_outputs();
  const Step& step = scheduler_.plan();
  if (step.empty()) return {};
  return builder_.build(step, ++step_id_);
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

void EngineCore::end_with_error(Stream& stream, std::string_view message, std::string_view reason) {
  SequenceOutput output;
  output.key = stream.owner.input.key;
  output.sample_index = stream.sample_index;
  output.num_cached_tokens = std::max(stream.num_cached_tokens, 0);
  output.finish_reason = reason;
  output.message = message;
  finish_stream(stream);
  emit(output);
}

void EngineCore::fail_step(std::string_view message) {
  VL_ASSERT(num_outstanding() > 0);
  result_id_ = step_id_;
  if (scheduler_.num_in_flight() > 0) fail_in_flight(message);
}

void EngineCore::fail_in_flight(std::string_view message) {
  const std::string reason = readable(message);
  std::array<Step, kMaxStepsInFlight> steps;
  const int32_t num_steps = scheduler_.num_in_flight();
  for (int32_t i = 0; i < num_steps; ++i) {
    steps[static_cast<size_t>(i)] = scheduler_.step_in_flight(i);
  }
  scheduler_.cancel_steps();
  for (const Step& step : steps) {
    for (const ScheduledSequence& part : step.sequences) {
      Stream& stream = static_cast<Stream&>(*part.sequence);
      if (stream.state == SequenceState::kFinished) continue;
      end_with_error(stream.group == nullptr ? stream : *stream.owner.streams.front(), reason);
    }
  }
  reap();
  publish_outputs();
}

void EngineCore::fail_everything(std::string_view message) {
  if (num_outstanding() > 0) fail_step(message);
  drain_inbox();
  for (const auto& [key, request] : requests_) {
    for (const auto& stream : request->streams) {
      if (stream->state != SequenceState::kFinished) end_with_error(*stream, message);
    }
  }
  reap();
  publish_outputs();
}

bool EngineCore::has_work() {
  if (!requests_.empty() || num_outstanding() > 0) return true;
  std::lock_guard lock(inbox_mutex_);
  return !inbox_.empty();
}

void EngineCore::emit(const SequenceOutput& output) { news_[client_of(output.key)].add(output); }

void EngineCore::check_invariants() const {
  scheduler_.check_invariants();
  int64_t num_unfinished = 0;
  for (const auto& [key, request] : requests_) {
    VL_ASSERT(key == request->input.key && client_of(key) < news_.size());
    const auto unfinished =
        std::count_if(request->streams.begin(), request->streams.end(), [](const auto& stream) {
          return stream->state != SequenceState::kFinished && stream->state != SequenceState::kBeam;
        });
    VL_ASSERT(unfinished > 0 && unfinished == request->num_unfinished);
    num_unfinished += unfinished;
  }
  const SchedulerStats stats = scheduler_.stats();
  VL_ASSERT(num_unfinished == stats.num_running + stats.num_waiting);
  VL_ASSERT(finished_.empty());
  for (const auto& request : ended_) {
    VL_ASSERT(request->num_unfinished == 0 && in_flight(*request));
  }
  VL_ASSERT(num_outstanding() >= scheduler_.num_in_flight() &&
            num_outstanding() <= max_outstanding_);
  // Between the calls of this interface everything has been let out.
  for (const OutputWriter& news : news_) VL_ASSERT(news.empty());
}

}  // namespace vllm_lite
