#include "engine/engine_core.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace vllm_lite {

// A sequence with what turns its tokens into text.
struct EngineCore::Stream : Sequence {
  Stream(Request& owner_request, const TokenTable& table, bool skip_special,
         std::shared_ptr<const StopAutomaton> automaton, bool include_stop)
      : owner(owner_request),
        detokenizer(table, skip_special),
        matcher(std::move(automaton), include_stop) {}

  Request& owner;
  SamplingParams sampling_params;  // the request's, with this sample's seed
  Detokenizer detokenizer;
  StopMatcher matcher;
};

struct EngineCore::Request {
  RequestInput input;
  std::vector<std::unique_ptr<Stream>> streams;
  int32_t num_unfinished = 0;
};

EngineCore::EngineCore(const EngineCoreConfig& config, TokenTable tokens)
    : config_(config),
      tokens_(std::move(tokens)),
      cache_(config.cache),
      scheduler_(config.scheduler, cache_),
      builder_(config.scheduler, config.cache.block_size) {
  VL_CHECK(config.num_clients >= 1, "num_clients must be at least 1");
  outbox_.resize(static_cast<size_t>(config.num_clients));
  stats_changed_.resize(static_cast<size_t>(config.num_clients));
  sampled_.reserve(static_cast<size_t>(config.scheduler.max_num_seqs));
  stats_.kv_total_blocks = cache_.num_blocks();
}

EngineCore::~EngineCore() { stop(); }

// --- inbox -------------------------------------------------------------------------------------

void EngineCore::submit(RequestInput input) {
  VL_CHECK(client_of(input.key) < outbox_.size(), "request key of an unknown client");
  VL_CHECK(input.num_samples >= 1, "num_samples must be at least 1");
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

void EngineCore::drain_inbox() {
  {
    std::lock_guard lock(inbox_mutex_);
    draining_.swap(inbox_);
  }
  for (InboxItem& item : draining_) {
    if (auto* input = std::get_if<RequestInput>(&item)) {
      add_request(std::move(*input));
    } else {
      abort_request(std::get<RequestKey>(item));
    }
  }
  draining_.clear();
}

void EngineCore::add_request(RequestInput input) {
  if (requests_.contains(input.key)) {
    refuse(input, "refused", "a request with this key is already running");
    return;
  }
  auto owned = std::make_unique<Request>();
  Request& request = *owned;
  request.input = std::move(input);
  const RequestInput& in = request.input;
  std::string_view failure;
  std::string message;
  try {
    auto automaton = std::make_shared<const StopAutomaton>(in.stops);
    for (int32_t i = 0; i < in.num_samples && failure.empty(); ++i) {
      auto stream = std::make_unique<Stream>(request, tokens_, in.skip_special_tokens, automaton,
                                             in.include_stop_in_output);
      stream->request = in.key;
      stream->sample_index = i;
      stream->priority = in.priority;
      stream->num_prompt_tokens = static_cast<int32_t>(in.prompt.size());
      stream->max_total_tokens =
          static_cast<int32_t>(std::min<int64_t>(int64_t{stream->num_prompt_tokens} + in.max_tokens,
                                                 scheduler_.config().max_model_len));
      stream->salt = in.salt;
      stream->tokens = in.prompt;
      stream->sampling_params = in.sampling;
      RowSampling& row = stream->sampling_params.row;
      const uint64_t seed = (uint64_t{row.seed_high} << 32 | row.seed_low) + static_cast<uint64_t>(i);
      row.seed_low = static_cast<uint32_t>(seed);
      row.seed_high = static_cast<uint32_t>(seed >> 32);
      row.num_prompt_tokens = stream->num_prompt_tokens;
      row.min_total_tokens = in.min_tokens > 0 ? stream->num_prompt_tokens + in.min_tokens : 0;
      stream->sampling = &stream->sampling_params;
      if (i > 0) stream->fork_parent = request.streams[0].get();
      if (scheduler_.add(stream.get()) == AddResult::kQueueFull) {
        failure = "queue_full";
        message = "the waiting queue is full (" +
                  std::to_string(scheduler_.config().max_num_waiting) + " sequences)";
        break;
      }
      ++request.num_unfinished;
      request.streams.push_back(std::move(stream));
    }
  } catch (const Error& error) {
    failure = "refused";
    message = error.what();
  }
  if (!failure.empty()) {
    for (auto& stream : request.streams) scheduler_.finish(stream.get());
    refuse(in, failure, message);
    return;
  }
  requests_.emplace(in.key, std::move(owned));
}

void EngineCore::refuse(const RequestInput& input, std::string_view reason,
                        std::string_view message) {
  for (int32_t i = 0; i < input.num_samples; ++i) {
    SequenceOutput output;
    output.key = input.key;
    output.sample_index = i;
    output.finish_reason = reason;
    output.message = message;
    emit(output);
  }
}

void EngineCore::abort_request(RequestKey key) {
  auto found = requests_.find(key);
  if (found == requests_.end()) return;
  for (auto& stream : found->second->streams) {
    if (stream->state != SequenceState::kFinished) finish_stream(*stream);
  }
}

void EngineCore::finish_stream(Stream& stream) {
  scheduler_.finish(&stream);
  if (--stream.owner.num_unfinished == 0) finished_.push_back(stream.owner.input.key);
}

void EngineCore::reap() {
  for (RequestKey key : finished_) requests_.erase(key);
  finished_.clear();
}

// --- one step ----------------------------------------------------------------------------------

std::span<const int32_t> EngineCore::begin_step() {
  VL_ASSERT(!in_flight_);
  drain_inbox();
  reap();
  publish_outputs();
  const Step& step = scheduler_.plan();
  if (step.empty()) return {};
  sampled_.clear();
  for (const ScheduledSequence& scheduled : step.sequences) {
    if (scheduled.samples) sampled_.push_back(static_cast<Stream*>(scheduled.sequence));
  }
  in_flight_ = true;
  return builder_.build(step, ++step_id_);
}

void EngineCore::finish_step(std::span<const int32_t> words) {
  VL_ASSERT(in_flight_);
  const StepResultView result(words);
  VL_ASSERT(result.step() == step_id_);
  if (result.header().error != 0) {
    fail_step(std::string(result.message().data(), result.message().size()));
    return;
  }
  VL_ASSERT(result.token_ids().size() == sampled_.size());
  scheduler_.commit(result.token_ids());
  in_flight_ = false;
  const bool has_logprobs = !result.logprobs().empty();
  for (size_t i = 0; i < sampled_.size(); ++i) {
    Stream& stream = *sampled_[i];
    if (stream.state == SequenceState::kFinished) continue;  // aborted while the step was under way
    const int32_t wanted = stream.sampling_params.row.num_logprobs;
    if (!has_logprobs || wanted < 0) {
      absorb(stream, result.token_ids()[i], nullptr);
      continue;
    }
    const auto row = static_cast<int32_t>(i);
    const auto count = static_cast<size_t>(wanted);
    const TokenLogprobs logprobs{result.logprobs()[i], result.ranks()[i],
                                 result.top_ids(row).first(count),
                                 result.top_logprobs(row).first(count)};
    absorb(stream, result.token_ids()[i], &logprobs);
  }
  reap();
  publish_outputs();
}

void EngineCore::absorb(Stream& stream, TokenId token, const TokenLogprobs* logprobs) {
  const RequestInput& input = stream.owner.input;
  SequenceOutput output;
  output.key = input.key;
  output.sample_index = stream.sample_index;
  output.num_cached_tokens = std::max(stream.num_cached_tokens, 0);
  if (token == kNoToken) {
    output.finish_reason = "error";
    output.message = "the model gave no finite logits to sample from";
    finish_stream(stream);
    emit(output);
    return;
  }
  output.token = token;
  output.logprobs = logprobs;
  piece_.clear();
  text_.clear();
  int32_t stop = -1;
  const auto& stop_ids = stream.sampling_params.stop_ids;
  const bool is_stop_id = std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end();
  if (is_stop_id) {
    output.finish_reason = "stop";
    const auto& eos = input.eos_ids;
    if (std::find(eos.begin(), eos.end(), token) == eos.end()) output.stop_token = token;
  }
  if (!is_stop_id || input.include_stop_in_output) stream.detokenizer.append(token, piece_);
  if (stream.num_output_tokens() < input.min_tokens) {
    text_ = piece_;  // too early for a stop string to count
  } else {
    stop = stream.matcher.append(piece_, text_);
    if (stop < 0 && !input.stops.empty()) {
      // Bytes still held because later tokens may change them count as they would stand at the
      // end, unless they are a character that is still being written.
      piece_.clear();
      stream.detokenizer.preview_tail(piece_);
      if (!piece_.empty() && piece_.find("\uFFFD") == std::string::npos &&
          stream.matcher.would_match(piece_) >= 0) {
        stop = stream.matcher.append(piece_, text_);
      }
    }
  }
  if (stop >= 0) {
    output.finish_reason = "stop";
    output.stop_token = -1;
    output.stop_string = input.stops[static_cast<size_t>(stop)];
  } else if (!is_stop_id && stream.num_tokens() >= stream.max_total_tokens) {
    output.finish_reason = "length";
  }
  if (!output.finish_reason.empty()) {
    if (stop < 0) {
      piece_.clear();
      stream.detokenizer.finish(piece_);
      stop = stream.matcher.append(piece_, text_);
      if (stop < 0) stream.matcher.finish(text_);
    }
    finish_stream(stream);
  }
  output.text = text_;
  emit(output);
}

void EngineCore::fail_step(const std::string& message) {
  VL_ASSERT(in_flight_);
  const Step& step = scheduler_.current_step();
  std::vector<Stream*> failed;
  for (const ScheduledSequence& scheduled : step.sequences) {
    failed.push_back(static_cast<Stream*>(scheduled.sequence));
  }
  scheduler_.cancel_step();
  in_flight_ = false;
  for (Stream* stream : failed) {
    if (stream->state == SequenceState::kFinished) continue;
    SequenceOutput output;
    output.key = stream->owner.input.key;
    output.sample_index = stream->sample_index;
    output.finish_reason = "error";
    output.message = message;
    finish_stream(*stream);
    emit(output);
  }
  reap();
  publish_outputs();
}

void EngineCore::fail_everything(const std::string& message) {
  if (in_flight_) fail_step(message);
  drain_inbox();
  for (auto& [key, request] : requests_) {
    for (auto& stream : request->streams) {
      if (stream->state == SequenceState::kFinished) continue;
      SequenceOutput output;
      output.key = key;
      output.sample_index = stream->sample_index;
      output.finish_reason = "error";
      output.message = message;
      finish_stream(*stream);
      emit(output);
    }
  }
  reap();
  publish_outputs();
}

bool EngineCore::has_work() {
  {
    std::lock_guard lock(inbox_mutex_);
    if (!inbox_.empty()) return true;
  }
  return !requests_.empty();
}

// --- outbox ------------------------------------------------------------------------------------

void EngineCore::emit(const SequenceOutput& output) {
  std::lock_guard lock(outbox_mutex_);
  outbox_[client_of(output.key)].add(output);
}

void EngineCore::publish_outputs() {
  const SchedulerStats scheduler = scheduler_.stats();
  const KvCacheStats& cache = cache_.stats();
  EngineStats stats;
  stats.num_running = scheduler.num_running;
  stats.num_waiting = scheduler.num_waiting;
  stats.kv_used_blocks = cache_.num_used_blocks();
  stats.kv_total_blocks = cache_.num_blocks();
  stats.prefix_queries = cache.prefix_queries;
  stats.prefix_hits = cache.prefix_hits;
  stats.num_preemptions = scheduler.num_preemptions;
  stats.num_steps = scheduler.num_steps;
  bool notify = false;
  {
    std::lock_guard lock(outbox_mutex_);
    const bool changed = stats.num_running != stats_.num_running ||
                         stats.num_waiting != stats_.num_waiting ||
                         stats.kv_used_blocks != stats_.kv_used_blocks;
    stats_ = stats;
    for (size_t client = 0; client < outbox_.size(); ++client) {
      if (changed) stats_changed_[client] = true;
      notify |= stats_changed_[client] || !outbox_[client].empty();
    }
  }
  if (notify) outbox_filled_.notify_one();
}

std::optional<std::string> EngineCore::take_outputs(uint16_t client) {
  std::lock_guard lock(outbox_mutex_);
  VL_CHECK(client < outbox_.size(), "unknown client");
  if (outbox_[client].empty() && !stats_changed_[client]) return std::nullopt;
  stats_changed_[client] = false;
  return outbox_[client].take(stats_);
}

std::vector<std::pair<uint16_t, std::string>> EngineCore::wait_outputs() {
  std::vector<std::pair<uint16_t, std::string>> messages;
  std::unique_lock lock(outbox_mutex_);
  outbox_filled_.wait(lock, [&] {
    for (size_t client = 0; client < outbox_.size(); ++client) {
      if (stats_changed_[client] || !outbox_[client].empty()) {
        stats_changed_[client] = false;
        messages.emplace_back(static_cast<uint16_t>(client), outbox_[client].take(stats_));
      }
    }
    return !messages.empty() || outbox_stopped_;
  });
  return messages;
}

EngineStats EngineCore::stats() {
  std::lock_guard lock(outbox_mutex_);
  return stats_;
}

// --- served loop -------------------------------------------------------------------------------

void EngineCore::run(ShmRing& plans, ShmRing& results, std::chrono::milliseconds step_timeout) {
  const auto fail = [&](const std::string& message) {
    fail_everything(message);
    throw Error(message);
  };
  while (true) {
    {
      std::unique_lock lock(inbox_mutex_);
      if (stopping_) return;
    }
    const std::span<const int32_t> plan = begin_step();
    if (plan.empty()) {
      std::unique_lock lock(inbox_mutex_);
      inbox_filled_.wait(lock, [&] { return stopping_ || !inbox_.empty(); });
      continue;
    }
    if (plan.size_bytes() > plans.max_message_bytes()) {
      fail_step("the step's plan has " + std::to_string(plan.size_bytes()) + " bytes, more than the " +
                std::to_string(plans.max_message_bytes()) + " of the ring to the worker");
      continue;
    }
    if (plans.push(std::as_bytes(plan), step_timeout) != ShmRing::Wait::kReady) {
      fail("the worker does not take plans any more");
    }
    std::span<const std::byte> message;
    const ShmRing::Wait wait = results.peek(message, step_timeout);
    if (wait == ShmRing::Wait::kClosed) fail("the worker closed its ring");
    if (wait == ShmRing::Wait::kTimeout) {
      fail("the worker gave no result within " + std::to_string(step_timeout.count()) + " ms");
    }
    finish_step({reinterpret_cast<const int32_t*>(message.data()), message.size() / sizeof(int32_t)});
    results.release();
  }
}

void EngineCore::stop() {
  {
    std::lock_guard lock(inbox_mutex_);
    stopping_ = true;
  }
  inbox_filled_.notify_all();
  {
    std::lock_guard lock(outbox_mutex_);
    outbox_stopped_ = true;
  }
  outbox_filled_.notify_all();
}

}  // namespace vllm_lite
