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
// Threads: submit(), abort(), the outbox, stats() and stop() may be called from any; all the rest
// belongs to one. The inbox is read between steps only, so nothing is added or aborted while a step
// is in flight.
//
// Invariant "all out": each sequence of an accepted request gives exactly one output with a
// finish_reason, its last, unless the request is aborted or the engine stopped. The texts of its
// outputs joined are what the tokenizer decodes from its tokens, up to where it ends.
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
#include "engine/detokenizer.h"
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
  int32_t max_tokens = 16;  // output tokens
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
};

struct EngineCoreConfig {
  SchedulerConfig scheduler;
  KvCacheConfig cache;
  int32_t num_clients = 1;
};

class EngineCore {
 public:
  // Throws Error for a configuration that cannot work (see Scheduler, KvCacheManager).
  EngineCore(const EngineCoreConfig& config, TokenTable tokens);
  ~EngineCore();

  // Throws Error for a key of an unknown client or without samples. Whatever else cannot run is
  // answered through the outbox, for each of its samples (finish_reason "refused" or "queue_full").
  void submit(RequestInput input);
  // The request's blocks come back when the step in flight, if any, has ended. Gives no output, but
  // that step may still. Unknown and finished keys are ignored.
  void abort(RequestKey key);

  // Takes what the inbox holds and plans a step. Empty: nothing to do. The words hold until
  // finish_step or fail_step, one of which must follow a non-empty plan.
  std::span<const int32_t> begin_step();
  // A result that says that the step failed is a fail_step. Words that are no result of this step
  // (see StepResultView) are one as well; then throws InternalError.
  void finish_step(std::span<const int32_t> result);
  // The step in flight failed as a whole: its requests end with an error, the others go on.
  void fail_step(std::string_view message);

  // Something is in the inbox, or some request is not finished.
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
  // Ends run(), once the step in flight has ended, and wait_outputs(); for good.
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
  void absorb(Stream& stream, TokenId token, const TokenLogprobs* logprobs);
  void end_with_error(Stream& stream, std::string_view message);
  void finish_stream(Stream& stream);
  void reap();
  void emit(const SequenceOutput& output);
  void publish_outputs();
  void run_step(std::span<const int32_t> plan, ShmRing& plans, ShmRing& results,
                std::chrono::milliseconds step_timeout);
  void fail_everything(std::string_view message);

  const TokenTable tokens_;
  KvCacheManager cache_;
  Scheduler scheduler_;
  StepBuilder builder_;
  uint64_t step_id_ = 0;
  bool in_flight_ = false;

  std::unordered_map<RequestKey, std::unique_ptr<Request>> requests_;
  std::vector<RequestKey> finished_;  // to be erased by reap()
  std::vector<Stream*> sampled_;      // of the step in flight, in the order of its logits
  std::string piece_, text_;          // scratch
  std::vector<OutputWriter> news_;    // per client, until publish_outputs()

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
