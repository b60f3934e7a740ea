// Everything between "a request with token ids arrived" and "tokens and text went out".
//
//   submit/abort ─► inbox ─► begin_step: scheduler plans, StepPlan words go out to the worker
//                            finish_step: result comes back, tokens become text, stops are judged ─► outbox
//
// submit(), abort() and the outbox are thread-safe; begin_step/finish_step/fail_step belong to one thread.
// Two ways to drive it: the caller steps it (in one process with the worker), or run() loops over a pair of
// shared-memory rings until stop() (worker in another process). Nothing here knows Python, torch or a socket.
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
  int32_t min_tokens = 0;   // stop strings before that many output tokens do not count
  CacheSalt salt{};
  SamplingParams sampling;  // sample i is seeded with seed + i
  std::vector<TokenId> eos_ids;  // the part of sampling.stop_ids that is reported without a stop_reason
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

  // Thread-safe. What cannot run is answered through the outbox (finish_reason "refused" or "queue_full").
  void submit(RequestInput input);
  // Thread-safe. Unknown and finished keys are ignored. Gives no output.
  void abort(RequestKey key);

  // Takes what the inbox holds and plans a step. Empty: nothing to do. The words hold until finish_step
  // or fail_step, one of which must follow a non-empty plan.
  std::span<const int32_t> begin_step();
  void finish_step(std::span<const int32_t> result);
  // The step in flight failed as a whole: its requests end with an error, the others go on.
  void fail_step(const std::string& message);

  bool has_work();

  // The message for a client, or nothing if there is nothing new. Thread-safe.
  std::optional<std::string> take_outputs(uint16_t client);
  // Blocks until some client has outputs, or stop(); then returns them all (empty: stopped).
  std::vector<std::pair<uint16_t, std::string>> wait_outputs();

  // Steps until stop(), with the worker behind the rings. Sleeps while there is nothing to do.
  // Throws Error if the worker closed its ring or gave no result within `step_timeout`; every request has
  // then been answered with an error.
  void run(ShmRing& plans, ShmRing& results, std::chrono::milliseconds step_timeout);
  // Thread-safe. Ends run() and wait_outputs().
  void stop();

  EngineStats stats();

 private:
  struct Stream;
  struct Request;
  using InboxItem = std::variant<RequestInput, RequestKey>;

  void drain_inbox();
  void add_request(RequestInput input);
  void abort_request(RequestKey key);
  void absorb(Stream& stream, TokenId token, const TokenLogprobs* logprobs);
  void refuse(const RequestInput& input, std::string_view reason, std::string_view message);
  void finish_stream(Stream& stream);
  void reap();
  void emit(const SequenceOutput& output);
  void publish_outputs();
  void fail_everything(const std::string& message);

  EngineCoreConfig config_;
  TokenTable tokens_;
  KvCacheManager cache_;
  Scheduler scheduler_;
  StepBuilder builder_;
  uint64_t step_id_ = 0;
  bool in_flight_ = false;

  std::unordered_map<RequestKey, std::unique_ptr<Request>> requests_;
  std::vector<RequestKey> finished_;   // to be erased once no step in flight uses them
  std::vector<Stream*> sampled_;       // of the step in flight, in the order of its logits
  std::string piece_, text_;           // scratch

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
