#include "core/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "core/check.h"

namespace vllm_lite {
namespace {

// For how long a worker watches for the next job: longer than the pauses between the ops of a step,
// shorter than those between steps, when other processes want the core.
constexpr std::chrono::microseconds kWatch{50};
constexpr int kLooksPerClock = 32;
constexpr int kLooksBeforeYield = 4096;

thread_local bool inside_job = false;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

bool pin_thread(pthread_t thread, int cpu) {
  if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(thread, sizeof(set), &set) == 0;
}

constexpr uint32_t job_of(uint64_t claimed) { return static_cast<uint32_t>(claimed >> 32); }
constexpr uint32_t unit_of(uint64_t claimed) { return static_cast<uint32_t>(claimed); }
constexpr uint64_t first_of(uint32_t job) { return static_cast<uint64_t>(job) << 32; }

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  VL_CHECK(num_threads >= 1,
           "a thread pool needs one thread at least, not " + std::to_string(num_threads));
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  stopping_ = true;
  ++alarm_;
  alarm_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t count, int64_t grain, const void* context, ParallelBody body) {
  grain = std::max<int64_t>(grain, 1);
  const int64_t units = (count + grain - 1) / grain;
  std::unique_lock owner(owner_, std::defer_lock);
  if (units <= 1 || units > UINT32_MAX || num_threads_ == 1 || inside_job || !owner.try_lock()) {
    body(context, 0, count);
    return;
  }
  // A number that no worker can claim from, until the fields are set. Those with work are even.
  const uint32_t job = job_of(claimed_.load(std::memory_order_relaxed)) + 2;
  // Who sees the new units sees that the old number is gone.
  claimed_.store(first_of(job - 1), std::memory_order_relaxed);
  units_.store(static_cast<uint32_t>(units), std::memory_order_release);
  count_.store(count, std::memory_order_relaxed);
  grain_.store(grain, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  claimed_.store(first_of(job));
  if (sleepers_.load() != 0) {
    ++alarm_;
    alarm_.notify_all();
  }
  help(job);
  for (int looks = 1; done_.load(std::memory_order_acquire) != units; ++looks) {
    if (looks % kLooksBeforeYield == 0) {
      std::this_thread::yield();
    } else {
      relax();
    }
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool ThreadPool::pin(const std::vector<int>& cpus) {
  VL_CHECK(cpus.size() == static_cast<size_t>(num_threads_),
           "pin_threads: " + std::to_string(cpus.size()) + " CPUs for " +
               std::to_string(num_threads_) + " threads");
  bool all = pin_thread(pthread_self(), cpus[0]);
  for (size_t i = 0; i < workers_.size(); ++i) {
    all &= pin_thread(workers_[i].native_handle(), cpus[i + 1]);
  }
  return all;
}

void ThreadPool::help(uint32_t job) {
  inside_job = true;
  uint64_t claimed = claimed_.load(std::memory_order_acquire);
  while (job_of(claimed) == job) {
    const uint32_t begin = unit_of(claimed), units = units_.load(std::memory_order_acquire);
    if (begin >= units) break;
    const uint32_t share = (units - begin) / (2 * static_cast<uint32_t>(num_threads()));
    const uint32_t end = begin + std::max(share, 1u);
    if (!claimed_.compare_exchange_weak(claimed, first_of(job) + end, std::memory_order_acq_rel)) {
      continue;
    }
    const int64_t grain = grain_.load(std::memory_order_relaxed);
    const int64_t count = count_.load(std::memory_order_relaxed);
    try {
      body_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), begin * grain,
                                            std::min(end * grain, count));
    } catch (...) {
      const std::lock_guard lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    done_.fetch_add(end - begin, std::memory_order_acq_rel);
    claimed = claimed_.load(std::memory_order_acquire);
  }
  inside_job = false;
}

void ThreadPool::work() {
  uint32_t seen = 0;  // the last job that this worker has helped with
  const auto has_job = [&] {
    const uint32_t job = job_of(claimed_.load());
    return job != seen && job % 2 == 0;
  };
  while (!stopping_) {
    const auto begin = std::chrono::steady_clock::now();
    for (int looks = 1; !has_job(); ++looks) {
      if (looks % kLooksPerClock == 0 && std::chrono::steady_clock::now() - begin > kWatch) break;
      relax();
    }
    if (!has_job()) {
      const uint32_t alarm = alarm_.load();
      ++sleepers_;
      if (!has_job() && !stopping_) alarm_.wait(alarm);
      --sleepers_;
      continue;
    }
    seen = job_of(claimed_.load(std::memory_order_acquire));
    if (seen % 2 == 0) help(seen);
  }
}

namespace {

// What runs in it keeps a pool alive that has been replaced. Never destroyed: at exit its threads
// may be gone already.
struct CurrentPool {
  std::mutex mutex;
  std::shared_ptr<ThreadPool> pool;

  std::shared_ptr<ThreadPool> get() {
    const std::lock_guard lock(mutex);
    return pool;
  }
};
CurrentPool& current_pool() {
  static auto* const current = new CurrentPool;
  return *current;
}

void run_in_pool(int64_t count, int64_t grain, const void* context, ParallelBody body) {
  current_pool().get()->run(count, grain, context, body);
}

}  // namespace

void set_num_threads(int num_threads) {
  CurrentPool& current = current_pool();
  std::shared_ptr<ThreadPool> previous = current.get();
  if (previous != nullptr && previous->num_threads() == num_threads) return;
  auto next = std::make_shared<ThreadPool>(num_threads);
  {
    const std::lock_guard lock(current.mutex);
    current.pool.swap(next);
  }
  set_parallel_backend(run_in_pool);
}

bool pin_threads(const std::vector<int>& cpus) {
  const std::shared_ptr<ThreadPool> pool = current_pool().get();
  VL_CHECK(pool != nullptr, "pin_threads: set_num_threads comes first");
  return pool->pin(cpus);
}

}  // namespace vllm_lite
