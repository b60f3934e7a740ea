// The threads of the CPU kernels.
//
// One job at a time, given by a thread that works on it too. Everyone claims ranges of the job
// until none is left, large ones first and smaller ones towards the end, so that a thread that has
// lost its core to another process holds up no more than a small range. Between jobs the workers
// watch for the next one for a short while, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/parallel_for.h"

namespace vllm_lite {

class ThreadPool {
 public:
  // num_threads: the caller of run() and num_threads - 1 workers.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  // A ParallelBackend. Runs the body on the calling thread alone if that is inside a job already,
  // or if the pool has a job of another thread. Throws what a body has thrown, when all are done.
  void run(int64_t count, int64_t grain, const void* context, ParallelBody body);
  // The caller stays on cpus[0], worker i on cpus[i]: num_threads() numbers of CPUs. False where
  // the system does not allow it; then some threads may be bound.
  bool pin(const std::vector<int>& cpus);

 private:
  // Claims ranges of `job` and works on them until nothing is left to claim.
  void help(uint32_t job);
  void work();

  const int num_threads_;
  // The job's number, and how many of its units (`grain` items) have been claimed. A claim succeeds
  // only while the number is the one that the claimer has seen, and the job cannot end before what
  // is claimed is done: what the fields below hold after a claim is the job's.
  std::atomic<uint64_t> claimed_{0};
  std::atomic<uint32_t> units_{0};
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> grain_{1};
  std::atomic<const void*> context_{nullptr};
  std::atomic<ParallelBody> body_{nullptr};
  alignas(64) std::atomic<uint32_t> done_{0};  // units
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> alarm_{0};  // sleepers wait for it to change
  std::atomic<bool> stopping_{false};
  std::mutex owner_;  // held while there is a job
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

// Makes parallel_for use a pool of so many threads, from the next call on. Not in a fork of a
// process that has a pool.
void set_num_threads(int num_threads);

// ThreadPool::pin of that pool. Throws Error if it has another number of threads.
bool pin_threads(const std::vector<int>& cpus);

}  // namespace vllm_lite
