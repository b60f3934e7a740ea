// The threads of the CPU kernels.
//
// One job at a time, given by the thread that owns the pool, which works on it too. Everyone claims
// ranges of the job until none is left, large ones first and smaller ones towards the end, so that
// a thread that has lost its core to another process holds up no more than a small range. Between
// jobs the workers watch for the next one for a short while, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/parallel_for.h"

namespace vllm_lite {

class ThreadPool {
 public:
  // num_threads: the caller and num_threads - 1 workers.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }
  // As ParallelBackend. A body that itself asks for threads runs alone.
  void run(int64_t count, int64_t grain, const void* context, ParallelBody body);

 private:
  void work();
  bool work_on_range(bool is_owner);
  void sleep(uint32_t seen);

  // (job << 32) | the first item that nobody has claimed. A claim succeeds only while the job is the
  // one that the claimer has seen, and its items are not done before the claimer is: so what the
  // job's other fields hold after a claim is the job's.
  std::atomic<uint64_t> next_{0};
  std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> grain_{1};
  std::atomic<const void*> context_{nullptr};
  std::atomic<ParallelBody> body_{nullptr};
  alignas(64) std::atomic<uint32_t> done_{0};  // items
  alignas(64) std::atomic<uint32_t> wake_{0};  // changes when there is work: what sleepers wait at
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

// Makes parallel_for use a pool of `num_threads`; 1: the caller alone. Not while anything runs.
void set_num_threads(int num_threads);
int current_num_threads();

}  // namespace vllm_lite
