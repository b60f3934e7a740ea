// Everything between "a request with token ids arrived" and "tokens and text went out".
//
// clang-format off
//   submit/abort -> inbox -> begin_step:  the scheduler plans, StepPlan words go out to the worker
//                            finish_step: the result comes back, tokens become text, stops are judged -> outbox
// clang-format on
//
// Two ways to drive it: the caller steps it (in one process with the worker), or run() loops over a
// pair of shared-memory rings until stop() (worker in another process). Nothing here knows Python,
// torch or a socket.
//
// With async_scheduling a plan may go out while the step before is in flight, so that the worker
// never waits for the next one; else each step ends before the next is planned. A worker in this
// process gains by it if its device works by itself.
//
// Threads: submit(), abort(), the outbox, stats() and stop() may be called from any; all the rest
// belongs to one. The inbox is read when a step is planned.
//
// Invariant "all out": each sequence of an accepted request gives exactly one output with a
// finish_reason, its last, unless the request is aborted or the engine stopped. The texts of its
// outputs joined are what the tokenizer decodes from its tokens, up to where it ends. A beam search
// gives as many as it is wide, or one if it fails.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "engine/beam_search.h"
#include "engine/detokenizer.h"
#include "engine/ngram_proposer.h"
#include "engine/output_writer.h"
#include "engine/stop_matcher.h"
#include "engine/token_table.h"
#include "ipc/shm_ring.h"
#include "scheduler/scheduler.h"
#include "scheduler/step_builder.h"

namespace vllm_lite {

struct RequestInput {
  RequestKey key = 0;
  std::vector<TokenId> prompt;
  int32_t num_samples = 1;
  int32_t priority = 0;
  int32_t max_tokens = 16;  // output tokens; 0: the request ends when its prompt is computed
  // Log-probabilities of the prompt's tokens from `prompt_logprobs_start` on (never of the first),
  // with so many of the likeliest each; -1: none. They come with the first output of sample 0.
  int32_t num_prompt_logprobs = -1;
  int32_t prompt_logprobs_start = 0;
  Pooling pooling = Pooling::kNone;  // else one sample, and no output tokens
  // The text that output tokens before this one complete is not searched for stop strings, and the
  // worker samples none of sampling.stop_ids before there are so many.
  int32_t min_tokens = 0;
  CacheSalt salt{};
  SamplingParams sampling;  // sample i is seeded with seed + i
  // The part of sampling.stop_ids that is reported without a stop_reason.
  std::vector<TokenId> eos_ids;
  std::vector<std::string> stops;
  bool include_stop_in_output = false;
  bool skip_special_tokens = true;
  // With a width the request is one beam search, and num_samples is 1. sampling.row.num_logprobs is
  // how many tokens after each beam are looked at (see BeamSearch::Continuations); nothing else of
  // the sampling parameters but stop_ids has a say, and stops are empty. Its outputs come all
  // together when the search has ended, sample i being the i-th best sequence, with logprobs.
  BeamSearchParams beam_search;
};

struct EngineCoreConfig {
  SchedulerConfig scheduler;
  KvCacheConfig cache;
  int32_t num_clients = 1;
  bool async_scheduling = false;
  // With scheduler.num_speculative_tokens, and without async_scheduling.
  NgramConfig ngram;
};

class EngineCore {
 public:
  // Throws Error for a configuration that cannot work (see Scheduler, KvCacheManager).
  EngineCore(const EngineCoreConfig& config, TokenTable tokens);
  ~EngineCore();

  // Throws Error for a key of an unknown client or without samples. Whatever else cannot run is
  // answered through the outbox, for each of its samples (finish_reason "refused" or "queue_full").
  void submit(RequestInput input);
  // Read, as submissions are, when the next step is planned; then the request's blocks come back
  // and it gives no more output. Unknown and finished keys are ignored.
  void abort(RequestKey key);

  // Takes what the inbox holds and plans a step. Empty: nothing to do, or nothing before the result
  // of the step in flight. The words hold until the next begin_step; finish_step or fail_step must
  // follow a non-empty plan. REQUIRES: num_outstanding() < max_outstanding().
  std::span<const int32_t> begin_step();
  // Plans that wait for their result.
  int32_t num_outstanding() const { return static_cast<int32_t>(step_id_ - result_id_); }
  int32_t max_outstanding() const { return max_outstanding_; }
  // The result of the oldest plan. If it says that the step failed, its requests and those of a
  // step planned on top of it end with an error, and the result of that one, which must still come,
  // is dropped. Words that are no result of the step (see StepResultView) are a fail_step; then
  // throws InternalError.
  void finish_step(std::span<const int32_t> result);
  // All that is outstanding failed, and gives no result: its requests end with an error, the others
  // go on.
  void fail_step(std::string_view message);

  // Something is in the inbox or in flight, or some request is not finished.
  bool has_work();

  // The message for a client, or nothing if there is nothing new. Throws Error for an unknown
  // client.
  std::optional<std::string> take_outputs(uint16_t client);
  // For one thread that serves all clients. Blocks until some client has news, or stop(); then
  // returns all there is (empty: stopped).
  std::vector<std::pair<uint16_t, std::string>> wait_outputs();

  // Steps until stop(), with the worker behind the rings; sleeps while there is nothing to do. A
  // plan that is longer than its ring's messages is a fail_step. Throws what went wrong if the
  // worker closed its ring, sent something that is no result, or let `step_timeout` pass without
  // one; every request has then been answered with that error.
  void run(ShmRing& plans, ShmRing& results, std::chrono::milliseconds step_timeout);
  // Ends run(), once what is outstanding has ended, and wait_outputs(); for good.
  void stop();

  EngineStats stats();

  // Throws InternalError unless every invariant of this, of the scheduler and of the cache holds.
  // Belongs to the stepping thread. O(everything there is).
  void check_invariants() const;

 private:
  struct Stream;
  struct Request;
  using InboxItem = std::variant<RequestInput, RequestKey>;

  bool drain_inbox();
  void add_request(RequestInput input);
  void start(Request& request);
  void abort_request(RequestKey key);
  void refuse(const RequestInput& input, std::string_view reason, std::string_view message);
  void check_result(const StepResultView& result) const;
  void fail_in_flight(std::string_view message);
  void absorb_row(Stream& stream, const StepResultView& result, int32_t row, int32_t num_tokens);
  void absorb(Stream& stream, TokenId token, int32_t num_tokens, const TokenLogprobs* logprobs);
  void absorb_drafts(const ScheduledSequence& part, const StepResultView& result,
                     DraftRounds& rounds);
  void propose_drafts(const Step& step);
  void absorb_scores(const Step& step, const StepResultView& result);
  void end_prompt(Stream& stream, std::span<const float> vector);
  void add_prompt_logprobs(SequenceOutput& output, const Stream& stream, int32_t num_tokens) const;
  void advance_search(const Stream& beam, const StepResultView& result, int32_t row);
  void finish_search(Request& request);
  void end_with_error(Stream& stream, std::string_view message, std::string_view reason = "error");
  void finish_stream(Stream& stream);
  void reap();
  bool in_flight(const Request& request) const;
  void emit(const SequenceOutput& output);
  void publish_outputs();
  void send_plan(std::span<const int32_t> plan, ShmRing& plans, ShmRing& results,
                 std::chrono::milliseconds step_timeout);
  void receive_result(ShmRing& results, std::chrono::milliseconds step_timeout);
  void fail_everything(std::string_view message);

  const TokenTable tokens_;
  KvCacheManager cache_;
  Scheduler scheduler_;
  StepBuilder builder_;
  const int32_t max_outstanding_;
  const NgramConfig ngram_;
  uint64_t step_id_ = 0;    // of the last plan
  uint64_t result_id_ = 0;  // of the last plan that has its result, or gets none

  std::unordered_map<RequestKey, std::unique_ptr<Request>> requests_;
  std::vector<RequestKey> finished_;             // to be taken out by reap()
  std::vector<std::unique_ptr<Request>> ended_;  // taken out, but a step in flight points to them
  std::string piece_, text_;                     // scratch
  std::vector<BeamSearch::Continuations> continuations_;  // scratch
  std::vector<Scheduler::NextBeam> next_beams_;           // scratch
  std::vector<BeamSearch::Token> hypothesis_;             // scratch
  std::vector<OutputWriter> news_;                        // per client, until publish_outputs()

  std::mutex inbox_mutex_;
  std::condition_variable inbox_filled_;
  std::vector<InboxItem> inbox_, draining_;
  bool stopping_ = false;

  std::mutex outbox_mutex_;
  std::condition_variable outbox_filled_;
  std::vector<OutputWriter> outbox_;
  std::vector<bool> stats_changed_;
  EngineStats stats_;
  bool outbox_stopped_ = false;
};

}  // namespace vllm_lite
