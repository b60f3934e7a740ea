// One block of threads in execution, and the scheduler of its threads.
//
// A block runs on one OS thread. Its CUDA threads are fibers that hand over to each other only
// where they have to wait: at a warp collective, a barrier or an mbarrier. Every thread is in
// exactly one state; the ready ones are the set bits of Warp::ready, and a warp's bit in
// Block::ready_warps says whether it has any.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda_on_host/fiber.h"
#include "cuda_on_host/language.h"
#include "cuda_on_host/wgmma.h"

namespace cuda_on_host {

inline constexpr int kWarpSize = 32;
inline constexpr int kMaxThreads = 1024;
inline constexpr uint32_t kCopyBytes = 16;  // of cp.async
inline constexpr int kNumBarriers = 16;
inline constexpr uint32_t kMaxMBarriers = 64;
inline constexpr uint32_t kMaxBulkCopies = 256;  // of one phase
inline constexpr size_t kMaxSharedVariables = 64;
inline constexpr uint32_t kStaticSharedBytes = 48 << 10;

struct Warp;

// A kind of warp collective. Lanes meet only in the same kind and under the same mask.
struct Collective {
  const char* name;
  // Called by the last lane; `lanes` are those that take part. Each lane's operands are at
  // warp.threads[lane]->operands.
  void (*complete)(Warp& warp, uint32_t lanes);
  // For ThreadSanitizer: what comes before what the lanes do afterwards. Only __syncwarp orders all
  // lanes; where the last lane reads memory for all of them, they are ordered after that one.
  enum class Order { kNone, kAll, kAfterLast } order = Order::kNone;
};

// cp.async: copies happen when they are waited for, so that a missing wait shows.
struct PendingCopy {
  void* to;
  const void* from;  // null: zeros
};
struct CopyQueue {
  std::vector<PendingCopy> copies;  // oldest first
  std::vector<size_t> group_ends;   // of the committed groups
};

struct Thread {
  Fiber fiber;
  uint3 index{};
  uint32_t lane = 0, warp = 0;
  bool done = false;
  const char* waits_at = nullptr;  // what it waits at; null while it runs
  void* operands = nullptr;        // of the collective it waits at, on its own stack
  CopyQueue copies;
  uint32_t proxy_fences = 0;  // fence.proxy.async so far
  WgmmaQueue wgmma;
};

struct Warp {
  // Lanes that have arrived at a collective and wait for the others that its mask names.
  struct Meeting {
    const Collective* collective = nullptr;  // null: the slot is free
    uint32_t mask = 0, arrived = 0;
    char* order = nullptr;
  };

  uint32_t number = 0;
  Thread* threads[kWarpSize] = {};
  uint32_t members = 0;  // lanes that exist
  uint32_t ready = 0, exited = 0;
  Meeting meetings[kWarpSize];
  long slots_used = 0;  // no slot from here on was ever taken
  // Tokens of happens-before, one for each of the latest collectives: with a single one, a lane
  // that wakes up late would also be ordered after what the others did since.
  uint32_t num_meetings = 0;
  char order[8];
};

// Barrier 0 is __syncthreads.
struct Barrier {
  uint32_t expected = 0, arrived = 0;
  uint32_t waiting[kMaxThreads / kWarpSize] = {};
  uint32_t phase = 0;
  uint32_t true_predicates[2] = {};  // by phase: late wakers still read the last one
  char order[2];
};

// sm_90's barrier object in shared memory: a phase ends when all arrivals are there and all
// expected bytes have been copied.
struct MBarrier {
  struct BulkCopy {
    void* to;
    const void* from;
    uint32_t bytes;
  };
  uint64_t* object = nullptr;
  uint32_t arrivals = 0, missing = 0;
  int64_t expected_bytes = 0, pending_bytes = 0;
  // Not a container: what it frees, another thread may have taken, which ThreadSanitizer would see.
  BulkCopy copies[kMaxBulkCopies];
  uint32_t num_copies = 0;
  uint32_t waiting[kMaxThreads / kWarpSize] = {};
  uint32_t phase = 0;
  char order[2];
};

// Shared memory: the static variables, then the dynamic part, with poisoned gaps around each.
struct SharedMemory {
  struct Variable {
    const void* key;
    std::byte* address;
  };
  // The latest cp.async to 16 bytes: which thread (1 and more; 0: none), after how many of its
  // fences.
  struct CopyMark {
    uint32_t writer, fences;
  };
  std::byte* memory = nullptr;
  size_t size = 0;
  std::byte* dynamic = nullptr;
  uint32_t dynamic_bytes = 0;
  size_t static_region = 0;          // bytes for the variables, with gaps
  size_t next_static = 0;            // offset of the next variable
  uint32_t static_bytes = 0;         // of all variables, without the gaps
  uint32_t limit = 0;                // static and dynamic
  std::vector<Variable> variables;   // never grows past what it reserved, for the same reason
  std::vector<CopyMark> copy_marks;  // of all 16 bytes; empty where there is no async proxy

  SharedMemory(uint32_t dynamic_size, uint32_t total_limit);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  void reset();  // everything NaN, no static variables
};

struct Block {
  // What all threads run.
  const std::function<void()>& kernel;
  dim3 grid, dim;
  uint3 index{};

  uint32_t num_threads, num_warps;
  std::unique_ptr<Thread[]> threads;
  std::unique_ptr<Warp[]> warps;
  Barrier barriers[kNumBarriers];
  MBarrier mbarriers[kMaxMBarriers];
  uint32_t num_mbarriers = 0;
  WarpGroup warp_groups[kMaxThreads / kWarpSize / kWarpsPerGroup];
  SharedMemory shared;

  Fiber os_thread;
  uint32_t live = 0;
  uint32_t ready_warps = 0, current_warp = 0;
  bool random = false;  // under a seed
  uint64_t random_state = 0;
  uint32_t polls = 0;
  std::exception_ptr error;
  char fence_order = 0;

  uint64_t num_started = 0, num_switches = 0, num_collectives = 0, num_barriers = 0;
  uint64_t num_matrix_loads = 0, num_bank_conflicts = 0;

  Block(const std::function<void()>& kernel_, dim3 grid_, dim3 dim_, uint32_t dynamic_shared_bytes,
        uint32_t shared_limit);
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Runs all threads to their end; throws what one of them threw.
  void run(uint3 block_index, uint64_t seed);
};

// The running CUDA thread; null outside of kernels.
struct Current {
  Block* block;
  Thread* thread;
};
// initial-exec: two words that a shared library need not call a function for.
extern constinit thread_local Current current __attribute__((tls_model("initial-exec")));

// Throws KernelError with the running block and thread, or those given.
[[noreturn]] void fail(const std::string& what);
[[noreturn]] void fail(const std::string& what, const Thread& thread);
std::string coordinates(uint3 index);
// Fails where the device that is pretended is older than sm_90.
void check_sm90(const char* what);

// The running thread waits (at something that has a name) until it is made ready.
void wait_at(const char* what);
void make_ready(const Thread& thread);
void make_ready(Warp& warp, uint32_t lanes);
// Of `waiting`, a mask of lanes for each warp, which is empty then.
void make_all_ready(uint32_t (&waiting)[kMaxThreads / kWarpSize]);
// Lets other threads run: always under a seed, else now and then, so that a loop that polls ends.
void scheduling_point();

// The running lane arrives; returns when all lanes of `mask` that still run have.
void meet(const Collective& collective, uint32_t mask, void* operands);

}  // namespace cuda_on_host

#define threadIdx (::cuda_on_host::current.thread->index)
#define blockIdx (::cuda_on_host::current.block->index)
#define blockDim (::cuda_on_host::current.block->dim)
#define gridDim (::cuda_on_host::current.block->grid)
#define warpSize (::cuda_on_host::kWarpSize)
