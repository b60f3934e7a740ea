#include "engine/engine_core.h"

#include <algorithm>
#include <array>

#include "core/check.h"
#include "engine/engine_request.h"
#include "engine/utf8.h"

namespace vllm_lite {
namespace {

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

// --- a step: its plan, and its failure (its result: engine_results.cpp) --------------------------

std::span<const int32_t> EngineCore::begin_step() {
  VL_ASSERT(num_outstanding() < max_outstanding_);
  if (drain_inbox()) publish_outputs();
  const Step& step = scheduler_.plan();
  if (step.empty()) return {};
  return builder_.build(step, ++step_id_);
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
