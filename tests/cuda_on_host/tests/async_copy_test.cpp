#include <cmath>

#include "kernel_test.h"

namespace {

using namespace vllm_lite::device;

class AsyncCopy : public KernelTest {
 protected:
  AsyncCopy() { cuda_on_host::options().compute_capability = 90; }
};

// What the destination of two committed groups and an open one holds after each step.
struct Seen {
  float before, after_one, after_two, zeros;
};

__global__ void copy_in_groups(const float4* from, Seen* out) {
  VL_SHARED(float4, to, [3][32]);
  const unsigned i = threadIdx.x;
  to[0][i] = make_float4(9, 9, 9, 9);
  copy_16_async(&to[0][i], &from[i]);
  commit_copies();
  copy_16_async(&to[1][i], &from[32 + i]);
  copy_16_async(&to[2][i], &from[i], /*valid=*/false);
  commit_copies();
  Seen& seen = out[i];
  seen.before = to[0][i].x;
  wait_copies<1>();
  seen.after_one = to[0][i].x + to[0][i].w;
  const bool second_is_there = !std::isnan(to[1][i].x);
  wait_copies<0>();
  seen.after_two = second_is_there ? -1 : to[1][i].x;
  seen.zeros = to[2][i].x + to[2][i].w;
}

TEST_F(AsyncCopy, GroupsArriveWhenWaitedForAndAreNaNUntilThen) {
  std::vector<float4> from(64);
  for (int i = 0; i < 64; ++i) from[i] = make_float4(i, 0, 0, 1000);
  for_each_order([&] {
    Seen out[32];
    VL_LAUNCH(copy_in_groups, 1, 32, 0, 0, from.data(), out);
    for (int i = 0; i < 32; ++i) {
      EXPECT_TRUE(std::isnan(out[i].before));
      EXPECT_EQ(out[i].after_one, i + 1000);
      EXPECT_EQ(out[i].after_two, i + 32);
      EXPECT_EQ(out[i].zeros, 0);
    }
  });
}

__global__ void misaligned_source(const float* from) {
  VL_SHARED(float4, to, [32]);
  copy_16_async(&to[threadIdx.x], from + 4 * threadIdx.x + (threadIdx.x == 5));
  commit_copies();
  wait_copies<0>();
}
__global__ void misaligned_target(const float4* from) {
  VL_SHARED(float4, to, [33]);
  copy_16_async(reinterpret_cast<float*>(&to[threadIdx.x]) + 1, &from[threadIdx.x]);
}
__global__ void never_waits(const float4* from) {
  VL_SHARED(float4, to, [32]);
  if (threadIdx.x == 6) copy_16_async(&to[0], &from[0]);
  commit_copies();
}
__global__ void copies_to_global(float4* to, const float4* from) { copy_16_async(to, from); }

TEST_F(AsyncCopy, MisuseIsReportedWithBlockAndThread) {
  std::vector<float4> from(64);
  const auto* floats = reinterpret_cast<const float*>(from.data());
  EXPECT_EQ(error_of([&] { VL_LAUNCH(misaligned_source, 1, 32, 0, 0, floats); }),
            "cp.async: an address is not 16-byte aligned [block (0,0,0) thread (5,0,0)]");
  EXPECT_CONTAINS(error_of([&] { VL_LAUNCH(misaligned_target, 1, 32, 0, 0, from.data()); }),
                  "cp.async: an address is not 16-byte aligned");
  EXPECT_EQ(error_of([&] { VL_LAUNCH(never_waits, 1, 32, 0, 0, from.data()); }),
            "the thread returned with cp.async copies in flight [block (0,0,0) thread (6,0,0)]");
  EXPECT_CONTAINS(
      error_of([&] { VL_LAUNCH(copies_to_global, 1, 1, 0, 0, from.data(), from.data()); }),
      "must be in shared memory");
}

// ---- mbarriers and bulk copies

__device__ void wait_for_phase(uint64_t* barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);
}

// Warp 0 copies tiles into a ring of two; warps 1 and 2 add them up.
__global__ void ring_of_tiles(const float* from, int num_tiles, float* out) {
  constexpr int kTile = 64, kStages = 2;
  VL_SHARED(float4, tiles, [kStages][kTile / 4]);
  VL_SHARED(uint64_t, full, [kStages]);
  VL_SHARED(uint64_t, empty, [kStages]);
  const unsigned i = threadIdx.x;
  if (i == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&full[stage], 1);
      mbarrier_init(&empty[stage], kTile);
    }
  }
  __syncthreads();
  if (i == 0) {
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int stage = tile % kStages;
      const uint32_t round = static_cast<uint32_t>(tile / kStages);
      wait_for_phase(&empty[stage], (round + 1) % 2);  // the first round does not wait
      const uint32_t half = kTile * sizeof(float) / 2;
      mbarrier_arrive_expect(&full[stage], 2 * half);
      copy_bulk_async(&tiles[stage][0], from + tile * kTile, half, &full[stage]);
      copy_bulk_async(&tiles[stage][kTile / 8], from + tile * kTile + kTile / 2, half,
                      &full[stage]);
    }
  } else if (i >= 32) {
    float sum = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int stage = tile % kStages;
      wait_for_phase(&full[stage], static_cast<uint32_t>(tile / kStages) % 2);
      sum += reinterpret_cast<const float*>(tiles[stage])[i - 32];
      mbarrier_arrive(&empty[stage]);
    }
    out[i - 32] = sum;
  }
}

TEST_F(AsyncCopy, MbarriersGuardARingOfBulkCopies) {
  constexpr int kTiles = 7;
  std::vector<float4> from(kTiles * 16);
  auto* values = reinterpret_cast<float*>(from.data());
  for (int i = 0; i < kTiles * 64; ++i) values[i] = static_cast<float>(i);
  for_each_order([&] {
    float out[64];
    VL_LAUNCH(ring_of_tiles, 1, 96, 0, 0, values, kTiles, out);
    for (int i = 0; i < 64; ++i) EXPECT_EQ(out[i], 64 * 21 + 7 * i);
  });
}

enum class BulkMistake {
  kNone,
  kWrongBytes,
  kNoInit,
  kTooManyBytes,
  kMisaligned,
  kOddSize,
  kOverwritten
};

__global__ void bulk_mistake(BulkMistake mistake, const float* from, float* out) {
  VL_SHARED(float4, to, [16]);
  VL_SHARED(uint64_t, barrier, );
  if (mistake != BulkMistake::kNoInit) mbarrier_init(&barrier, 1);
  if (mistake == BulkMistake::kOverwritten) barrier = 0;
  copy_bulk_async(to, from + (mistake == BulkMistake::kMisaligned),
                  mistake == BulkMistake::kOddSize ? 100 : 128, &barrier);
  if (mistake == BulkMistake::kTooManyBytes) {
    mbarrier_arrive(&barrier);
  } else {
    mbarrier_arrive_expect(&barrier, mistake == BulkMistake::kWrongBytes ? 256 : 128);
  }
  wait_for_phase(&barrier, 0);
  *out = to[0].x;
}

TEST_F(AsyncCopy, BulkMisuseIsReported) {
  std::vector<float4> from(16, make_float4(3, 3, 3, 3));
  const auto error = [&](BulkMistake mistake) {
    float out = 0;
    return error_of([&] {
      VL_LAUNCH(bulk_mistake, 1, 1, 0, 0, mistake, reinterpret_cast<float*>(from.data()), &out);
      EXPECT_EQ(out, 3);
    });
  };
  EXPECT_EQ(error(BulkMistake::kNone), "");
  EXPECT_CONTAINS(error(BulkMistake::kWrongBytes),
                  "deadlock: 1 of 1 threads wait, (0,0,0) at mbarrier.try_wait; an mbarrier "
                  "lacks 0 arrivals and expects 256 bytes, of which 128 are being copied");
  EXPECT_CONTAINS(error(BulkMistake::kNoInit), "the mbarrier is not initialised");
  EXPECT_CONTAINS(error(BulkMistake::kOverwritten), "or was overwritten");
  EXPECT_CONTAINS(error(BulkMistake::kMisaligned), "cp.async.bulk: an address is not 16-byte");
  EXPECT_CONTAINS(error(BulkMistake::kOddSize), "cp.async.bulk of 100 bytes");
  EXPECT_CONTAINS(error(BulkMistake::kTooManyBytes),
                  "expects 0 bytes, of which 128 are being copied");
  cuda_on_host::options().compute_capability = 80;
  EXPECT_CONTAINS(error(BulkMistake::kNone), "needs compute capability 9.0");
}

__global__ void bulk_in_flight_at_the_end(const float* from) {
  VL_SHARED(float4, to, [16]);
  VL_SHARED(uint64_t, barrier, );
  mbarrier_init(&barrier, 1);
  copy_bulk_async(to, from, 128, &barrier);
}

TEST_F(AsyncCopy, BulkCopiesInFlightAtTheEndAreAnError) {
  std::vector<float4> from(16);
  EXPECT_EQ(error_of([&] {
              VL_LAUNCH(bulk_in_flight_at_the_end, 1, 1, 0, 0,
                        reinterpret_cast<float*>(from.data()));
            }),
            "the block ended with bulk copies in flight [block (0,0,0)]");
}

}  // namespace
