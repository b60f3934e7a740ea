// Barriers of the block, atomics, and the order of threads and blocks.
#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "kernel_test.h"

namespace {

using vllm_lite::device::barrier_arrive;
using vllm_lite::device::barrier_sync;

constexpr int kThreads = 96;

class Barriers : public KernelTest {};

__global__ void rotate(int* out, int rounds) {
  VL_SHARED(int, values, [2][kThreads]);
  const int i = static_cast<int>(threadIdx.x);
  values[0][i] = i;
  for (int round = 0; round < rounds; ++round) {
    __syncthreads();
    values[(round + 1) % 2][i] = values[round % 2][(i + 1) % kThreads];
  }
  out[i] = values[rounds % 2][i];
}

TEST_F(Barriers, SyncthreadsSeparatesPhases) {
  for_each_order([] {
    int out[kThreads];
    VL_LAUNCH(rotate, 1, kThreads, 0, 0, out, 50);
    for (int i = 0; i < kThreads; ++i) EXPECT_EQ(out[i], (i + 50) % kThreads);
  });
}

__global__ void count_predicates(std::array<int, 6>* out) {
  const bool third = threadIdx.x % 3 == 0;
  out[threadIdx.x] = {__syncthreads_count(third), __syncthreads_or(third), __syncthreads_and(third),
                      __syncthreads_count(0),     __syncthreads_or(0),     __syncthreads_and(1)};
}

TEST_F(Barriers, Predicates) {
  for_each_order([] {
    std::array<int, 6> out[kThreads];
    VL_LAUNCH(count_predicates, 1, kThreads, 0, 0, out);
    for (const auto& x : out) EXPECT_EQ(x, (std::array<int, 6>{32, 1, 0, 0, 0, 1}));
  });
}

// Warp 0 produces for warps 1 and 2, which meet at barriers of their own.
__global__ void pipeline(int* out) {
  VL_SHARED(int, value, );
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (int round = 0; round < 5; ++round) {
    if (warp == 0) {
      if (threadIdx.x == 0) value = round + 1;
      barrier_arrive(1, kThreads);
      barrier_sync(2, kThreads);
    } else {
      barrier_sync(1, kThreads);
      out[threadIdx.x] += value;
      barrier_arrive(2, kThreads);
    }
  }
}

TEST_F(Barriers, NamedBarriersOfProducersAndConsumers) {
  for_each_order([] {
    int out[kThreads] = {};
    VL_LAUNCH(pipeline, 1, kThreads, 0, 0, out);
    for (int i = 0; i < kThreads; ++i) EXPECT_EQ(out[i], i < 32 ? 0 : 15);
  });
}

__global__ void sync_after_exit() {
  if (threadIdx.x == 40) return;
  __syncthreads();
}
__global__ void some_skip_the_barrier() {
  if (threadIdx.x < 32) __syncthreads();
  __syncthreads();
}
__global__ void different_counts() { barrier_sync(1, threadIdx.x < 32 ? 64 : 96); }
__global__ void part_of_a_warp() { barrier_sync(1, 40); }
__global__ void no_such_barrier() { barrier_sync(16, kThreads); }
__global__ void trap_in_thread_3() {
  if (threadIdx.x == 3 && threadIdx.y == 1) __trap();
}

template <typename Kernel>
std::string error_in_block(Kernel kernel) {
  return error_of([&] { VL_LAUNCH(kernel, 1, kThreads, 0, 0); });
}

TEST_F(Barriers, MisuseIsReportedWithBlockAndThread) {
  EXPECT_CONTAINS(error_in_block(sync_after_exit),
                  "the thread returned while others wait for it at __syncthreads() "
                  "[block (0,0,0) thread (40,0,0)]");
  EXPECT_CONTAINS(error_in_block(some_skip_the_barrier),
                  "threads of the block returned [block (0,0,0) thread (");
  EXPECT_CONTAINS(error_in_block(different_counts), "disagree about how many it is for: 96 and 64");
  EXPECT_CONTAINS(error_in_block(part_of_a_warp), "must be whole warps");
  EXPECT_CONTAINS(error_in_block(no_such_barrier), "barrier 16 does not exist");
  const std::string error = error_of([] { VL_LAUNCH(trap_in_thread_3, 1, dim3(16, 2), 0, 0); });
  EXPECT_EQ(error, "__trap() [block (0,0,0) thread (3,1,0)]");
}

TEST_F(Barriers, BarrierAfterExitsIsReportedInEveryOrder) {
  for_each_order([] { EXPECT_CONTAINS(error_in_block(sync_after_exit), "return"); });
}

// ---- atomics

struct Totals {
  int sum = 0, most = 0, least = 0, exclusive = 0;
  unsigned ones = 0, bits = 0, kept = ~0u;
  unsigned long long wide = 0;
  float real = 0;
};

__global__ void accumulate(Totals* totals, int* lock, int* seen) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int ticket = atomicAdd(&totals->sum, 1);
  seen[ticket] = i;
  atomicMax(&totals->most, i);
  atomicMin(&totals->least, -i);
  atomicOr(&totals->bits, 1u << i % 32);
  atomicAnd(&totals->kept, ~(1u << i % 7));
  atomicAdd(&totals->wide, 1ull << 33);
  atomicAdd(&totals->real, 0.5f);
  // A spin lock: threads of one warp compete for it.
  while (atomicCAS(lock, 0, 1) != 0) {
  }
  __threadfence();
  totals->exclusive += 1;
  __threadfence();
  atomicExch(lock, 0);
}

TEST_F(Barriers, Atomics) {
  for_each_order([] {
    constexpr int kBlocks = 3, kTotal = kBlocks * kThreads;
    Totals totals;
    int lock = 0;
    std::vector<int> seen(kTotal, -1);
    VL_LAUNCH(accumulate, kBlocks, kThreads, 0, 0, &totals, &lock, seen.data());
    EXPECT_EQ(totals.sum, kTotal);
    EXPECT_EQ(totals.most, kTotal - 1);
    EXPECT_EQ(totals.least, -(kTotal - 1));
    EXPECT_EQ(totals.bits, ~0u);
    EXPECT_EQ(totals.kept, ~0x7fu);
    EXPECT_EQ(totals.wide, static_cast<unsigned long long>(kTotal) << 33);
    EXPECT_EQ(totals.real, kTotal * 0.5f);
    EXPECT_EQ(totals.exclusive, kTotal);
    std::sort(seen.begin(), seen.end());
    for (int i = 0; i < kTotal; ++i) EXPECT_EQ(seen[i], i);
  });
}

// ---- order

__global__ void record_order(int* order, int* place) {
  for (int step = 0; step < 2; ++step) {
    order[atomicAdd(place, 1)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    __syncthreads();
  }
}

std::vector<int> order_under(uint64_t seed) {
  cuda_on_host::options().seed = seed;
  cuda_on_host::options().workers = 1;
  std::vector<int> order(4 * 64 * 2);
  int place = 0;
  VL_LAUNCH(record_order, 4, 64, 0, 0, order.data(), &place);
  return order;
}

TEST_F(Barriers, EachSeedIsAnOrderOfItsOwn) {
  std::set<std::vector<int>> orders;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const std::vector<int> order = order_under(seed);
    EXPECT_EQ(order, order_under(seed)) << "seed " << seed;
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 5);
}

TEST_F(Barriers, WithoutASeedThreadsRunInOrder) {
  const std::vector<int> order = order_under(0);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(order[i], i);
}

}  // namespace
