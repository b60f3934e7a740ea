// What a test sets before a launch, what it counts afterwards, and what it may catch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace cuda_on_host {

struct Options {
  // 0: threads run in order, each until it has to wait. Otherwise a thread is drawn at random at
  // every point where another one could run, and the blocks start in a random order; one seed is
  // one order. At first: the environment's CUDA_ON_HOST_SEED.
  uint64_t seed = 0;
  int workers = 0;  // blocks at once; 0: one per core

  // The device that kernels and their launchers see.
  int num_multiprocessors = 4;
  int compute_capability = 80;  // 10 * major + minor; at first the environment's
                                // CUDA_ON_HOST_COMPUTE_CAPABILITY, if there is one
};
// Not to be changed while a kernel runs.
Options& options();

// Since the program started.
struct Counters {
  uint64_t threads = 0;
  uint64_t switches = 0;        // from one thread to another
  uint64_t collectives = 0;     // lanes that arrived at a warp collective
  uint64_t barriers = 0;        // threads that arrived at a block barrier
  uint64_t matrix_loads = 0;    // 8x8 matrices read by ldmatrix
  uint64_t bank_conflicts = 0;  // extra passes over shared memory that they needed
};
Counters counters();

// A kernel did what it must not. what() ends with the block and the thread.
class KernelError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A launch that a device would refuse.
class LaunchError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace cuda_on_host
