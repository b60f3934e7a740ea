#include <algorithm>
#include <numeric>

#include "kernel_test.h"

namespace {

constexpr uint32_t kAll = 0xffffffffu;
constexpr int kLanes = 32;

// ---- shuffles

template <typename T>
T value_of_lane(int lane) {
  return static_cast<T>(lane * 1000003 + 7);
}

enum class Kind { kIndex, kUp, kDown, kXor };

template <typename T>
__global__ void shuffle_kernel(Kind kind, int argument, int width, T* out) {
  const int lane = static_cast<int>(threadIdx.x) % warpSize;
  const T x = value_of_lane<T>(lane);
  T& result = out[threadIdx.x];
  switch (kind) {
    case Kind::kIndex:
      result = __shfl_sync(kAll, x, argument, width);
      break;
    case Kind::kUp:
      result = __shfl_up_sync(kAll, x, argument, width);
      break;
    case Kind::kDown:
      result = __shfl_down_sync(kAll, x, argument, width);
      break;
    case Kind::kXor:
      result = __shfl_xor_sync(kAll, x, argument, width);
      break;
  }
}

// CUDA's programming guide: segments of `width` lanes; who would leave its segment keeps its value
// (xor may reach into an earlier one).
int expected_source(Kind kind, int lane, int argument, int width) {
  const int segment = lane / width * width, place = lane % width;
  switch (kind) {
    case Kind::kIndex:
      return segment + argument % width;
    case Kind::kUp:
      return place < argument ? lane : lane - argument;
    case Kind::kDown:
      return place + argument >= width ? lane : lane + argument;
    case Kind::kXor:
      return (lane ^ argument) < segment + width ? lane ^ argument : lane;
  }
  return -1;
}

template <typename T>
void check_shuffles() {
  for (const Kind kind : {Kind::kIndex, Kind::kUp, Kind::kDown, Kind::kXor}) {
    for (const int width : {1, 2, 4, 8, 16, 32}) {
      for (int argument = 0; argument < 32; ++argument) {
        T out[2 * kLanes];
        VL_LAUNCH(shuffle_kernel<T>, 1, 2 * kLanes, 0, 0, kind, argument, width, out);
        for (int i = 0; i < 2 * kLanes; ++i) {
          const int source = expected_source(kind, i % kLanes, argument, width);
          ASSERT_EQ(out[i], value_of_lane<T>(source))
              << "kind " << static_cast<int>(kind) << " width " << width << " argument " << argument
              << " thread " << i;
        }
      }
    }
  }
}

class WarpOps : public KernelTest {};

TEST_F(WarpOps, ShufflesOf4And8Bytes) {
  check_shuffles<int>();
  cuda_on_host::options().seed = 5;
  check_shuffles<uint64_t>();
  check_shuffles<float>();
}

__global__ void shuffle_in_halves(int* out) {
  const uint32_t mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  // The halves meet apart, in different collectives.
  const int x = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = threadIdx.x < 16 ? __shfl_xor_sync(mask, x, 1) : __shfl_sync(mask, x, 20);
}

TEST_F(WarpOps, PartsOfAWarpMeetApart) {
  for_each_order([] {
    int out[kLanes];
    VL_LAUNCH(shuffle_in_halves, 1, kLanes, 0, 0, out);
    for (int i = 0; i < kLanes; ++i) EXPECT_EQ(out[i], i < 16 ? i ^ 1 : 20);
  });
}

// ---- votes, match, reductions

struct Votes {
  uint32_t ballot, match, match_wide;
  int any, all, all_true;
};

__global__ void vote_kernel(const int* predicates, Votes* out) {
  const int predicate = predicates[threadIdx.x];
  const uint64_t wide = static_cast<uint64_t>(predicate) << 40;
  out[threadIdx.x] = {__ballot_sync(kAll, predicate), __match_any_sync(kAll, predicate),
                      __match_any_sync(kAll, wide),   __any_sync(kAll, predicate),
                      __all_sync(kAll, predicate),    __all_sync(kAll, 1)};
}

TEST_F(WarpOps, VotesAndMatch) {
  std::mt19937 random(1);
  for_each_order([&] {
    for (const int range : {1, 2, 3, 8}) {
      int predicates[kLanes];
      for (int& predicate : predicates) predicate = static_cast<int>(random()) % range;
      Votes out[kLanes];
      VL_LAUNCH(vote_kernel, 1, kLanes, 0, 0, predicates, out);
      uint32_t ballot = 0;
      for (int i = 0; i < kLanes; ++i) ballot |= static_cast<uint32_t>(predicates[i] != 0) << i;
      for (int i = 0; i < kLanes; ++i) {
        uint32_t same = 0;
        for (int j = 0; j < kLanes; ++j) {
          same |= static_cast<uint32_t>(predicates[i] == predicates[j]) << j;
        }
        EXPECT_EQ(out[i].ballot, ballot);
        EXPECT_EQ(out[i].match, same);
        EXPECT_EQ(out[i].match_wide, same);
        EXPECT_EQ(out[i].any, ballot != 0);
        EXPECT_EQ(out[i].all, ballot == kAll);
        EXPECT_EQ(out[i].all_true, 1);
      }
    }
  });
}

struct Reductions {
  int add, min, max;
  unsigned unsigned_add, unsigned_min, unsigned_max, bits_and, bits_or, bits_xor;
};

__global__ void reduce_kernel(const int* values, Reductions* out) {
  const int x = values[threadIdx.x];
  const auto u = static_cast<unsigned>(x);
  out[threadIdx.x] = {
      __reduce_add_sync(kAll, x), __reduce_min_sync(kAll, x), __reduce_max_sync(kAll, x),
      __reduce_add_sync(kAll, u), __reduce_min_sync(kAll, u), __reduce_max_sync(kAll, u),
      __reduce_and_sync(kAll, u), __reduce_or_sync(kAll, u),  __reduce_xor_sync(kAll, u)};
}

TEST_F(WarpOps, Reductions) {
  std::mt19937 random(2);
  int values[kLanes];
  for (int& value : values) value = static_cast<int>(random());
  unsigned sum = 0, all = kAll, some = 0, odd = 0, least = kAll, most = 0;
  for (const int value : values) {
    const auto u = static_cast<unsigned>(value);
    sum += u;
    all &= u;
    some |= u;
    odd ^= u;
    least = std::min(least, u);
    most = std::max(most, u);
  }
  for_each_order([&] {
    Reductions out[kLanes];
    VL_LAUNCH(reduce_kernel, 1, kLanes, 0, 0, values, out);
    for (const Reductions& r : out) {
      EXPECT_EQ(r.add, static_cast<int>(sum));
      EXPECT_EQ(r.min, *std::min_element(values, values + kLanes));
      EXPECT_EQ(r.max, *std::max_element(values, values + kLanes));
      EXPECT_EQ(r.unsigned_add, sum);
      EXPECT_EQ(r.unsigned_min, least);
      EXPECT_EQ(r.unsigned_max, most);
      EXPECT_EQ(r.bits_and, all);
      EXPECT_EQ(r.bits_or, some);
      EXPECT_EQ(r.bits_xor, odd);
    }
  });
}

__global__ void exchange_through_shared(int* out) {
  VL_SHARED(int, values, [kLanes]);
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = values[kLanes - 1 - threadIdx.x];
}

TEST_F(WarpOps, SyncWarpOrdersSharedMemory) {
  for_each_order([] {
    int out[kLanes];
    VL_LAUNCH(exchange_through_shared, 1, kLanes, 0, 0, out);
    for (int i = 0; i < kLanes; ++i) EXPECT_EQ(out[i], kLanes - 1 - i);
  });
}

__global__ void collective_after_exits(int* out) {
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = static_cast<int>(__ballot_sync(kAll, 1));
}

TEST_F(WarpOps, LanesThatReturnedAreNotWaitedFor) {
  for_each_order([] {
    int out[kLanes] = {};
    VL_LAUNCH(collective_after_exits, 1, kLanes, 0, 0, out);
    for (int i = 0; i < 20; ++i) EXPECT_EQ(out[i], (1 << 20) - 1);
  });
}

TEST_F(WarpOps, PartialWarp) {
  int out[20];
  VL_LAUNCH(collective_after_exits, 1, 20, 0, 0, out);
  EXPECT_EQ(out[0], (1 << 20) - 1);
}

// ---- errors

__global__ void different_collectives(int* out) {
  out[threadIdx.x] = threadIdx.x == 7 ? __any_sync(kAll, 1) : __shfl_sync(kAll, 1, 0);
}
__global__ void different_masks(int* out) {
  out[threadIdx.x] = __any_sync(threadIdx.x == 7 ? 0xffu : kAll, 1);
}
__global__ void outside_the_mask(int* out) { out[threadIdx.x] = __any_sync(0x0fffffffu, 1); }
__global__ void missing_lane(int* out) {
  if (threadIdx.x != 9) out[threadIdx.x] = __any_sync(kAll, 1);
  __syncthreads();
}
__global__ void reads_from_no_one(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0xffffu, 1, 8);
}
__global__ void odd_width(int* out) { out[threadIdx.x] = __shfl_sync(kAll, 1, 0, 12); }

template <typename Kernel>
std::string error_of_warp(Kernel kernel) {
  int out[kLanes];
  return error_of([&] { VL_LAUNCH(kernel, dim3(1, 2), kLanes, 0, 0, out); });
}

TEST_F(WarpOps, MisuseIsReportedWithBlockAndThread) {
  cuda_on_host::options().workers = 1;
  std::string error = error_of_warp(different_collectives);
  EXPECT_CONTAINS(error, "divergence: lanes of one warp are at __any_sync() and __shfl_sync()");
  EXPECT_CONTAINS(error, "[block (0,0,0) thread (7,0,0)]");
  error = error_of_warp(different_masks);
  EXPECT_CONTAINS(error, "under different masks [block (0,0,0) thread (7,0,0)]");
  error = error_of_warp(outside_the_mask);
  EXPECT_CONTAINS(error, "__any_sync() is called by a lane that its mask does not name");
  EXPECT_CONTAINS(error, "[block (0,0,0) thread (28,0,0)]");
  error = error_of_warp(missing_lane);
  EXPECT_CONTAINS(error, "deadlock: 32 of 32 threads wait, (0,0,0) at __any_sync(), ");
  EXPECT_CONTAINS(error, ", ... [block (0,0,0) thread (0,0,0)]");
  error = error_of_warp(reads_from_no_one);
  EXPECT_CONTAINS(error, "a shuffle reads from lane 16, which takes no part in it");
  EXPECT_CONTAINS(error, "[block (0,0,0) thread (8,0,0)]");
  error = error_of_warp(odd_width);
  EXPECT_CONTAINS(error, "a shuffle of width 12");
}

TEST_F(WarpOps, MisuseIsReportedInEveryOrder) {
  for_each_order([] {
    EXPECT_CONTAINS(error_of_warp(different_collectives), "divergence");
    EXPECT_CONTAINS(error_of_warp(different_masks), "divergence");
    EXPECT_CONTAINS(error_of_warp(outside_the_mask), "does not name");
    EXPECT_CONTAINS(error_of_warp(missing_lane), "deadlock");
    EXPECT_CONTAINS(error_of_warp(reads_from_no_one), "takes no part");
  });
}

}  // namespace
