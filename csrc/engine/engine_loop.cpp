// The engine core's sides to other threads (outbox) and to a worker in another process (run).
#include <exception>

#include "core/check.h"
#include "engine/engine_core.h"

namespace vllm_lite {

// --- outbox ------------------------------------------------------------------------------------

// Lets out what emit() collected, all of a step at once, and the new state.
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
  stats.num_drafts = scheduler.num_drafted_parts;
  stats.num_draft_tokens = scheduler.num_draft_tokens;
  stats.num_accepted_tokens = scheduler.num_accepted_tokens;
  bool notify = false;
  {
    std::lock_guard lock(outbox_mutex_);
    // Also a step that gives nothing is news: clients see that the engine lives.
    const bool changed =
        stats.num_steps != stats_.num_steps || stats.num_running != stats_.num_running ||
        stats.num_waiting != stats_.num_waiting || stats.kv_used_blocks != stats_.kv_used_blocks;
    stats_ = stats;
    for (size_t client = 0; client < outbox_.size(); ++client) {
      if (changed) stats_changed_[client] = true;
      outbox_[client].append(news_[client]);
      notify |= stats_changed_[client] || !outbox_[client].empty();
    }
  }
  if (notify) outbox_filled_.notify_one();
}

std::optional<std::string> EngineCore::take_outputs(uint16_t client) {
  std::lock_guard lock(outbox_mutex_);
  VL_CHECK(client < outbox_.size(), "client is " + std::to_string(client) +
                                        ", but there are only " + std::to_string(outbox_.size()) +
                                        " clients");
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

// Plans as long as the worker has fewer plans than it may have, then takes in results.
void EngineCore::run(ShmRing& plans, ShmRing& results, std::chrono::milliseconds step_timeout) {
  try {
    for (;;) {
      bool stopping = false;
      {
        std::lock_guard lock(inbox_mutex_);
        stopping = stopping_;
      }
      if (!stopping) {
        const std::span<const int32_t> plan = begin_step();
        if (!plan.empty()) {
          send_plan(plan, plans, results, step_timeout);
          if (num_outstanding() < max_outstanding_) continue;
        }
      }
      if (num_outstanding() > 0) {
        receive_result(results, step_timeout);
        continue;
      }
      if (stopping) return;
      std::unique_lock lock(inbox_mutex_);
      inbox_filled_.wait(lock, [&] { return stopping_ || !inbox_.empty(); });
    }
  } catch (const std::exception& error) {
    fail_everything(error.what());
    throw;
  }
}

void EngineCore::send_plan(std::span<const int32_t> plan, ShmRing& plans, ShmRing& results,
                           std::chrono::milliseconds step_timeout) {
  if (plan.size_bytes() > plans.max_message_bytes()) {
    const std::string message = "the step's plan has " + std::to_string(plan.size_bytes()) +
                                " bytes, but the ring to the worker holds messages of at most " +
                                std::to_string(plans.max_message_bytes());
    // The worker has the plan before: that step goes on.
    while (num_outstanding() > 1) receive_result(results, step_timeout);
    fail_step(message);
    return;
  }
  const ShmRing::Wait pushed = plans.push(std::as_bytes(plan), step_timeout);
  VL_CHECK(pushed != ShmRing::Wait::kClosed, "the worker closed its ring");
  VL_CHECK(pushed == ShmRing::Wait::kReady, "the worker took no plan within " +
                                                std::to_string(step_timeout.count()) +
                                                " ms (step_timeout)");
}

void EngineCore::receive_result(ShmRing& results, std::chrono::milliseconds step_timeout) {
  std::span<const std::byte> message;
  const ShmRing::Wait answered = results.peek(message, step_timeout);
  VL_CHECK(answered != ShmRing::Wait::kClosed, "the worker closed its ring");
  VL_CHECK(answered == ShmRing::Wait::kReady, "the worker gave no result within " +
                                                  std::to_string(step_timeout.count()) +
                                                  " ms (step_timeout)");
  VL_CHECK(message.size() % sizeof(int32_t) == 0,
           "the worker's result has " + std::to_string(message.size()) + " bytes: no whole words");
  finish_step({reinterpret_cast<const int32_t*>(message.data()), message.size() / sizeof(int32_t)});
  results.release();
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
