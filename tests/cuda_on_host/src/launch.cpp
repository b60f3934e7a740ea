#include "cuda_on_host/launch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda_on_host/block.h"
#include "cuda_on_host/options.h"
#include "sanitizers.h"

namespace cuda_on_host {
namespace {

std::mutex mutex;  // of what follows
std::map<const void*, int> allowed_dynamic_shared;
Counters totals;

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : std::strtoull(value, nullptr, 10);
}

Options initial_options() {
  Options initial;
  initial.seed = from_environment("CUDA_ON_HOST_SEED", initial.seed);
  initial.compute_capability = static_cast<int>(
      from_environment("CUDA_ON_HOST_COMPUTE_CAPABILITY", initial.compute_capability));
  return initial;
}

struct SharedLimits {
  uint32_t dynamic, total;
};

SharedLimits shared_limits(const void* kernel) {
  const std::lock_guard lock(mutex);
  const auto found = allowed_dynamic_shared.find(kernel);
  if (found == allowed_dynamic_shared.end() || found->second <= kDefaultSharedBytes) {
    return {kDefaultSharedBytes, kDefaultSharedBytes};
  }
  // The permission is for the dynamic part; static variables come on top.
  return {static_cast<uint32_t>(found->second), static_cast<uint32_t>(max_dynamic_shared_bytes())};
}

void check_launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, uint32_t limit) {
  const auto refuse = [](const std::string& what) { throw LaunchError("invalid launch: " + what); };
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64) {
    refuse("a block of " + std::to_string(block.x) + " x " + std::to_string(block.y) + " x " +
           std::to_string(block.z) + " threads");
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 0xffffu ||
      grid.z > 0xffffu) {
    refuse("a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
           std::to_string(grid.z) + " blocks");
  }
  if (dynamic_shared_bytes > limit) {
    refuse(std::to_string(dynamic_shared_bytes) + " bytes of dynamic shared memory; " +
           std::to_string(limit) + " are allowed (allow_dynamic_shared)");
  }
}

// In order, or as the seed shuffles them.
std::vector<uint64_t> block_order(uint64_t num_blocks) {
  std::vector<uint64_t> order(num_blocks);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (options().seed != 0) {
    std::mt19937_64 random(options().seed);
    std::shuffle(order.begin(), order.end(), random);
  }
  return order;
}

int num_workers(uint64_t num_blocks) {
  int workers = options().workers;
  if (workers <= 0) workers = static_cast<int>(std::thread::hardware_concurrency());
  // ThreadSanitizer takes what runs on one OS thread for ordered.
  if (kThreadSanitizer && options().workers <= 0) workers = std::max(workers, 2);
  return static_cast<int>(std::min(static_cast<uint64_t>(std::max(workers, 1)), num_blocks));
}

void count(const Block& block) {
  const std::lock_guard lock(mutex);
  totals.threads += block.num_started;
  totals.switches += block.num_switches;
  totals.collectives += block.num_collectives;
  totals.barriers += block.num_barriers;
  totals.matrix_loads += block.num_matrix_loads;
  totals.bank_conflicts += block.num_bank_conflicts;
}

}  // namespace

Options& options() {
  static Options current_options = initial_options();
  return current_options;
}

Counters counters() {
  const std::lock_guard lock(mutex);
  return totals;
}

int max_dynamic_shared_bytes() {
  switch (options().compute_capability) {
    case 80:
    case 87:
      return 163 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99 << 10;
    default:
      return 227 << 10;
  }
}

void allow_dynamic_shared(const void* kernel, int bytes) {
  if (bytes > max_dynamic_shared_bytes()) {
    throw LaunchError(std::to_string(bytes) + " bytes of dynamic shared memory: a block may use " +
                      std::to_string(max_dynamic_shared_bytes()));
  }
  const std::lock_guard lock(mutex);
  allowed_dynamic_shared[kernel] = bytes;
}

int blocks_per_multiprocessor(int threads, int dynamic_shared_bytes) {
  // Of sm_80 and sm_90; registers, which the host cannot know, may allow fewer.
  constexpr int kThreads = 2048, kBlocks = 32, kReservedSharedBytes = 1 << 10;
  const int shared = max_dynamic_shared_bytes() + kReservedSharedBytes;
  return std::min(
      {kBlocks, kThreads / threads, shared / (dynamic_shared_bytes + kReservedSharedBytes)});
}

void launch_blocks(const void* kernel, dim3 grid, dim3 block_dim, size_t dynamic_shared_bytes,
                   const std::function<void()>& thread_body) {
  const SharedLimits limits = shared_limits(kernel);
  check_launch(grid, block_dim, dynamic_shared_bytes, limits.dynamic);
  const uint64_t num_blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  const std::vector<uint64_t> order = block_order(num_blocks);
  const auto workers = static_cast<uint64_t>(num_workers(num_blocks));

  // Made and destroyed here, not by the workers: their locks would order one worker's blocks after
  // another's in ThreadSanitizer's eyes.
  std::vector<std::unique_ptr<Block>> blocks(workers);
  for (auto& block : blocks) {
    block = std::make_unique<Block>(thread_body, grid, block_dim,
                                    static_cast<uint32_t>(dynamic_shared_bytes), limits.total);
  }
  std::vector<std::exception_ptr> errors(workers);
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&](uint64_t worker) {
    uint64_t rounds = 0;
    // ThreadSanitizer is to see neighbours on different OS threads, every time.
    const auto take_next = [&] { return kThreadSanitizer ? rounds++ * workers + worker : next++; };
    try {
      for (uint64_t i = take_next(); i < num_blocks && !failed; i = take_next()) {
        const uint64_t k = order[i];
        blocks[worker]->run(
            {static_cast<unsigned>(k % grid.x), static_cast<unsigned>(k / grid.x % grid.y),
             static_cast<unsigned>(k / grid.x / grid.y)},
            options().seed + k);
      }
    } catch (...) {
      failed = true;
      errors[worker] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t i = 1; i < workers; ++i) threads.emplace_back(work, i);
  work(0);
  for (std::thread& thread : threads) thread.join();
  for (const auto& block : blocks) count(*block);
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace cuda_on_host
