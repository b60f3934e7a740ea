#include <cmath>
#include <cstring>

#include "kernel_test.h"

namespace {

using namespace vllm_lite;
using namespace vllm_lite::device;

constexpr int kGroup = 128;  // threads
constexpr int kRows = 64;    // of a and d
constexpr int kStep = 16;    // k of one wgmma
constexpr int kTileRows = 128;
constexpr int kTileColumns = 128;
constexpr int kTileElements = kTileRows * kTileColumns;
constexpr int kTileBytes = kTileElements * 2;
constexpr int kColumnBlockBytes = kTileRows * 128;

class Wgmma : public KernelTest {
 protected:
  Wgmma() { cuda_on_host::options().compute_capability = 90; }
};

// ---- products. Shared memory holds a tile of 128 x 128: of which rows or columns are b's, the
// kernel says. Where an element is stored, as the PTX ISA's 128-byte swizzle has it.
int place_in_tile(int row, int column) {
  const int chunk = column % 64 / 8;
  return column / 64 * kColumnBlockBytes / 2 + row * 64 + (chunk ^ row % 8) * 8 + column % 8;
}

template <typename T>
struct Problem {
  const uint32_t* a;     // [k / 16, threads, 4]: fragments
  const uint16_t* tile;  // as it is stored
  float* d;              // [threads, 4 kBlocks]; what it is at first, and the result
  int k;
  int k0, column0;  // where b begins
  bool accumulate;
};

template <typename T>
__device__ void load_tile(const Problem<T>& p, uint16_t* shared) {
  for (unsigned i = threadIdx.x; i < kTileElements / 8; i += blockDim.x) {
    copy_16_async(shared + 8 * i, p.tile + 8 * i);
  }
  commit_copies();
  wait_copies<0>();
  fence_async_proxy();
  __syncthreads();
}

template <typename T, WgmmaB kB, int kBlocks>
__global__ void product_kernel(const Problem<T> p) {
  VL_DYNAMIC_SHARED(uint16_t, shared);
  load_tile(p, shared);
  const unsigned thread = threadIdx.x;
  float d[kBlocks][4];
  uint32_t a[kTileRows / kStep][4];
  std::memcpy(d, p.d + thread * 4 * kBlocks, sizeof(d));
  const int steps = p.k / kStep;
  std::memcpy(a, p.a + thread * 4 * steps, steps * sizeof(a[0]));
  wgmma_fence();
  for (int i = 0; i < steps; ++i) {
    const int k = p.k0 + i * kStep;
    // The row and column of the stored tile where b begins; k runs along rows or columns.
    const int row = kB == WgmmaB::kRows ? k : p.column0,
              column = kB == WgmmaB::kRows ? p.column0 : k;
    const uint16_t* start = shared + column / 64 * kColumnBlockBytes / 2 + row * 64 + column % 64;
    wgmma<T, kB>(d, a[i], wgmma_matrix(start, kColumnBlockBytes), p.accumulate || i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  std::memcpy(p.d + thread * 4 * kBlocks, d, sizeof(d));
}

// The same by mma_16x8x16, from the elements themselves.
template <typename T, WgmmaB kB, int kBlocks>
__global__ void mma_kernel(const Problem<T> p) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  float d[kBlocks][4];
  std::memcpy(d, p.d + thread * 4 * kBlocks, sizeof(d));
  const auto element = [&p](int k, int column) -> uint32_t {
    k += p.k0, column += p.column0;
    return p.tile[kB == WgmmaB::kRows ? place_in_tile(k, column) : place_in_tile(column, k)];
  };
  for (int i = 0; i < p.k / kStep; ++i) {
    uint32_t a[4];
    std::memcpy(a, p.a + (thread * p.k / kStep + i) * 4, sizeof(a));
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t b[2];
      for (int half = 0; half < 2; ++half) {
        const int k = i * kStep + half * 8 + lane % 4 * 2, column = block * 8 + lane / 4;
        b[half] = element(k, column) | element(k + 1, column) << 16;
      }
      if (i == 0 && !p.accumulate) std::memset(d[block], 0, sizeof(d[block]));
      mma_16x8x16<T>(d[block], a, b);
    }
  }
  std::memcpy(p.d + thread * 4 * kBlocks, d, sizeof(d));
}

// PTX ISA, wgmma.mma_async.m64nNk16: warp w holds rows 16 w and on, as m16n8k16's fragments.
int row_of_a(int thread, int i) {
  return thread / 32 * 16 + thread % 32 / 4 + (i / 2 % 2 == 0 ? 0 : 8);
}
int column_of_a(int thread, int i) { return thread % 4 * 2 + i % 2 + (i < 4 ? 0 : 8); }
int row_of_d(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + (i < 2 ? 0 : 8); }
int column_of_d(int thread, int i) { return thread % 4 * 2 + i % 2; }

template <typename T, WgmmaB kB, int kBlocks>
void check_product(int k, int k0, int column0, bool accumulate) {
  SCOPED_TRACE("k " + std::to_string(k) + " from " + std::to_string(k0) + ", columns from " +
               std::to_string(column0));
  const int steps = k / kStep;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> a(kRows * k), c(kRows * 8 * kBlocks);
  std::vector<uint16_t> tile(kTileElements);
  for (float& x : a) x = to_float(from_float<T>(normal(random)));
  for (uint16_t& x : tile) x = from_float<T>(normal(random)).bits;
  for (float& x : c) x = normal(random);
  std::vector<uint32_t> fragments(kGroup * steps * 4);
  std::vector<float> d(kGroup * 4 * kBlocks);
  for (int thread = 0; thread < kGroup; ++thread) {
    for (int step = 0; step < steps; ++step) {
      for (int i = 0; i < 4; ++i) {
        const auto element = [&](int j) {
          return a[row_of_a(thread, j) * k + step * kStep + column_of_a(thread, j)];
        };
        fragments[(thread * steps + step) * 4 + i] = pack<T>(element(2 * i), element(2 * i + 1));
      }
    }
    for (int i = 0; i < 4 * kBlocks; ++i) {
      d[thread * 4 * kBlocks + i] =
          c[row_of_d(thread, i % 4) * 8 * kBlocks + i / 4 * 8 + column_of_d(thread, i)];
    }
  }
  std::vector<float> by_mma = d;
  VL_LAUNCH((mma_kernel<T, kB, kBlocks>), 1, kGroup, 0, 0,
            Problem<T>{fragments.data(), tile.data(), by_mma.data(), k, k0, column0, accumulate});
  allow_dynamic_shared(product_kernel<T, kB, kBlocks>, kTileBytes);
  VL_LAUNCH((product_kernel<T, kB, kBlocks>), 1, kGroup, kTileBytes, 0,
            Problem<T>{fragments.data(), tile.data(), d.data(), k, k0, column0, accumulate});
  EXPECT_EQ(std::memcmp(d.data(), by_mma.data(), d.size() * sizeof(float)), 0);
  for (int thread = 0; thread < kGroup; ++thread) {
    for (int i = 0; i < 4 * kBlocks; ++i) {
      const int row = row_of_d(thread, i % 4), column = i / 4 * 8 + column_of_d(thread, i);
      double sum = accumulate ? c[row * 8 * kBlocks + column] : 0.0;
      for (int j = 0; j < k; ++j) {
        const int place = kB == WgmmaB::kRows ? place_in_tile(k0 + j, column0 + column)
                                              : place_in_tile(column0 + column, k0 + j);
        sum += static_cast<double>(a[row * k + j]) * to_float(T{tile[place]});
      }
      ASSERT_NEAR(d[thread * 4 * kBlocks + i], sum, 1e-4) << row << " " << column;
    }
  }
}

template <typename T, WgmmaB kB>
void check_products() {
  check_product<T, kB, 16>(kStep, 0, 0, false);
  check_product<T, kB, 8>(kStep, 0, 0, true);
  check_product<T, kB, 8>(kStep, 48, 64, false);  // k within the swizzle, or rows from 48 on
  check_product<T, kB, 8>(2 * kStep, 80, 0, true);
  check_product<T, kB, 16>(8 * kStep, 0, 0, true);  // through all columns or rows of the tile
  check_product<T, kB, 16>(8 * kStep, 0, 0, false);
}

TEST_F(Wgmma, IsTheProductThatMmaMakes) {
  for_each_order([] {
    check_products<BFloat16, WgmmaB::kRows>();
    check_products<BFloat16, WgmmaB::kColumns>();
    check_products<Float16, WgmmaB::kRows>();
    check_products<Float16, WgmmaB::kColumns>();
  });
}

// ---- a warp that copies, and two groups that multiply what it copied

__device__ void wait_for_phase(uint64_t* barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);
}

// Warp 8 brings tiles [64][64] of b, warps 0 to 7 multiply them with ones: each row of d is the
// sums of b's columns.
__global__ void ring_of_tiles(const uint16_t* tiles, int num_tiles, float* out) {
  constexpr int kStages = 2, kElements = 64 * 64, kConsumers = 2 * kGroup;
  VL_DYNAMIC_SHARED(uint16_t, stages);
  VL_SHARED(uint64_t, full, [kStages]);
  VL_SHARED(uint64_t, empty, [kStages]);
  const unsigned thread = threadIdx.x;
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&full[stage], 32);
      mbarrier_init(&empty[stage], kConsumers / 32);
    }
  }
  __syncthreads();
  if (thread >= kConsumers) {
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int stage = tile % kStages;
      wait_for_phase(&empty[stage], static_cast<uint32_t>(tile / kStages + 1) % 2);
      for (int i = static_cast<int>(thread) - kConsumers; i < kElements / 8; i += 32) {
        const int row = i / 8, chunk = i % 8;
        copy_16_async(stages + stage * kElements + row * 64 + (chunk ^ row % 8) * 8,
                      tiles + tile * kElements + 8 * i);
      }
      commit_copies();
      wait_copies<0>();
      fence_async_proxy();
      mbarrier_arrive(&full[stage]);
    }
    return;
  }
  float d[8][4] = {};
  uint32_t ones[4];
  for (uint32_t& x : ones) x = pack<BFloat16>(1, 1);
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % kStages;
    wait_for_phase(&full[stage], static_cast<uint32_t>(tile / kStages) % 2);
    wgmma_fence();
    for (int k = 0; k < 64; k += kStep) {
      wgmma<BFloat16, WgmmaB::kRows>(d, ones, wgmma_matrix(stages + stage * kElements + k * 64, 0),
                                     true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (thread % 32 == 0) mbarrier_arrive(&empty[stage]);
  }
  for (int i = 0; i < 32; ++i) out[thread * 32 + i] = d[i / 4][i % 4];
}

TEST_F(Wgmma, ConsumersOfARingThatOneWarpFills) {
  constexpr int kTiles = 5;
  std::vector<float4> storage(kTiles * 64 * 64 / 8);
  auto* tiles = reinterpret_cast<uint16_t*>(storage.data());
  const auto value = [](int tile, int row, int column) {
    return static_cast<float>((tile * 7 + row * 3 + column) % 11 - 5);
  };
  for (int i = 0; i < kTiles * 64 * 64; ++i) {
    tiles[i] = from_float<BFloat16>(value(i / 4096, i / 64 % 64, i % 64)).bits;
  }
  for_each_order([&] {
    std::vector<float> out(2 * kGroup * 32);
    VL_LAUNCH(ring_of_tiles, 1, 2 * kGroup + 32, 2 * 64 * 64 * 2, 0, tiles, kTiles, out.data());
    for (int thread = 0; thread < 2 * kGroup; ++thread) {
      for (int i = 0; i < 32; ++i) {
        const int column = i / 4 * 8 + column_of_d(thread, i);
        float sum = 0;
        for (int row = 0; row < kTiles * 64; ++row) sum += value(row / 64, row % 64, column);
        ASSERT_EQ(out[thread * 32 + i], sum) << thread << " " << i;
      }
    }
  });
}

// A descriptor has 18 bits of an address.
__global__ void matrix_at_the_end(int bytes, float* out) {
  VL_SHARED(float, one, );
  VL_DYNAMIC_SHARED(uint16_t, shared);
  const unsigned thread = threadIdx.x;
  uint16_t* matrix = shared + bytes / 2 - kStep * 64;
  if (thread == 0) one = 1;
  for (unsigned i = thread; i < kStep * 64; i += kGroup) matrix[i] = from_float<BFloat16>(3).bits;
  fence_async_proxy();
  __syncthreads();
  float d[8][4];
  uint32_t a[4];
  for (uint32_t& x : a) x = pack<BFloat16>(one, one);
  wgmma_fence();
  wgmma<BFloat16, WgmmaB::kRows>(d, a, wgmma_matrix(matrix, 0), false);
  wgmma_commit();
  wgmma_wait<0>();
  out[thread] = d[7][3];
}

TEST_F(Wgmma, ReachesTheEndOfSharedMemory) {
  constexpr int kBytes = 226 << 10;
  std::vector<float> out(kGroup);
  allow_dynamic_shared(matrix_at_the_end, kBytes);
  VL_LAUNCH(matrix_at_the_end, 1, kGroup, kBytes, 0, kBytes, out.data());
  for (const float x : out) ASSERT_EQ(x, 3 * kStep);
}

// ---- mistakes

enum class Mistake {
  kNone,
  kNoProxyFence,
  kNoFence,
  kNoCommit,
  kNoWait,
  kWaitsForTooFew,
  kCopiesInFlight,
  kAWritten,
  kAWrittenAfterFence,
  kSumsWritten,
  kSumsWrittenAfterFence,
  kMatrixWritten,
  kSwizzleMode,
  kBaseOffset,
  kUnevenStart,
  kNotTheFirstRow,
  kInsideARow,
  kPastTheEnd,
  kDescriptorOfALane,
  kDescriptorOfAWarp,
  kLaneSkips,
  kLaneSkipsFence,
  kWarpReturns,
  kWarpReturnsLater,
  kWarpWaits,
};

// d = 2 a b by two products; a is all ones, b [16][64] of twos in 2 KiB.
__global__ void mistaken_kernel(Mistake mistake, const uint16_t* twos, float* out) {
  VL_DYNAMIC_SHARED(uint16_t, b);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const bool is_one_lane = thread == 37, is_one_warp = warp == 3;
  copy_16_async(b + 8 * thread, twos);
  commit_copies();
  if (mistake != Mistake::kCopiesInFlight) wait_copies<0>();
  if (mistake != Mistake::kNoProxyFence || !is_one_lane) fence_async_proxy();
  __syncthreads();
  if (mistake == Mistake::kWarpReturns && is_one_warp) return;
  float d[8][4] = {};
  uint32_t a[4];
  for (uint32_t& x : a) x = pack<BFloat16>(1, 1);
  uint64_t matrix = wgmma_matrix(b, 0);
  const auto change = [&](Mistake one, bool where, uint64_t bits) {
    if (mistake == one && where) matrix ^= bits;
  };
  change(Mistake::kSwizzleMode, true, uint64_t{3} << 62);
  change(Mistake::kBaseOffset, true, uint64_t{5} << 49);
  change(Mistake::kUnevenStart, true, 1);
  change(Mistake::kNotTheFirstRow, true, 128 / 16);
  change(Mistake::kInsideARow, true, 32 / 16);
  change(Mistake::kPastTheEnd, true, uint64_t{0x3000} << 32);
  change(Mistake::kDescriptorOfALane, is_one_lane, 1024 / 16);
  change(Mistake::kDescriptorOfAWarp, is_one_warp, uint64_t{1} << 16);
  if (mistake == Mistake::kWarpWaits && is_one_warp) barrier_sync(1, kGroup);
  if (mistake == Mistake::kLaneSkipsFence && is_one_lane) __syncwarp();
  if (mistake != Mistake::kNoFence) wgmma_fence();
  if (mistake == Mistake::kLaneSkips && is_one_lane) __syncwarp();
  for (int i = 0; i < 2; ++i) {
    if (i == 1 && mistake == Mistake::kAWrittenAfterFence && is_one_lane) a[2] = 0;
    wgmma<BFloat16, WgmmaB::kRows>(d, a, matrix, i == 1);
    if (mistake != Mistake::kNoCommit) wgmma_commit();
    if (i == 0 && mistake == Mistake::kAWrittenAfterFence) wgmma_wait<0>();
    if (i == 0 && mistake == Mistake::kSumsWrittenAfterFence) {
      wgmma_wait<0>();
      for (float& x : d[7]) x *= 0.5f;
    }
    if (mistake == Mistake::kWarpReturnsLater && is_one_warp && i == 0) {
      wgmma_wait<0>();
      return;
    }
  }
  __syncthreads();  // no data race, but still too early
  if (mistake == Mistake::kCopiesInFlight) wait_copies<0>();
  if (mistake == Mistake::kAWritten && is_one_lane) a[2] = 0;
  if (mistake == Mistake::kSumsWritten && is_one_lane) d[5][1] = 0;
  if (mistake == Mistake::kMatrixWritten && is_one_lane) b[1000] = 0;
  __syncthreads();
  if (mistake == Mistake::kWaitsForTooFew) wgmma_wait<1>();
  for (int i = 0; i < 32; ++i) out[thread * 32 + i] = d[i / 4][i % 4];
  if (mistake == Mistake::kNoWait) return;
  wgmma_wait<0>();
  if (mistake == Mistake::kWaitsForTooFew) return;
  for (int i = 0; i < 32; ++i) out[thread * 32 + i] = d[i / 4][i % 4];
}

class WgmmaMistakes : public Wgmma {
 protected:
  std::string error(Mistake mistake, unsigned threads = kGroup) {
    return error_of([&] {
      VL_LAUNCH(mistaken_kernel, 1, threads, 2048, 0, mistake, twos_.data(), out_.data());
    });
  }
  std::vector<uint16_t> twos_ = std::vector<uint16_t>(8, from_float<BFloat16>(2).bits);
  std::vector<float> out_ = std::vector<float>(kGroup * 32);
};

TEST_F(WgmmaMistakes, NoneIsNone) {
  for_each_order([&] {
    EXPECT_EQ(error(Mistake::kNone), "");
    for (const float x : out_) ASSERT_EQ(x, 64);
  });
}

TEST_F(WgmmaMistakes, OfTheAsyncProxy) {
  EXPECT_CONTAINS(error(Mistake::kNoProxyFence),
                  "cp.async data read by wgmma without fence.proxy.async: thread (37,0,0) copied "
                  "it and has had no fence since [block (0,0,0) thread");
  EXPECT_CONTAINS(error(Mistake::kCopiesInFlight),
                  "the matrix in shared memory changed while a wgmma product was under way");
  EXPECT_CONTAINS(error(Mistake::kMatrixWritten),
                  "the matrix in shared memory changed while a wgmma product was under way");
}

TEST_F(WgmmaMistakes, OfWaits) {
  EXPECT_CONTAINS(error(Mistake::kNoCommit), "returned with wgmma products in flight [block");
  EXPECT_CONTAINS(error(Mistake::kNoWait), "returned with wgmma products in flight [block");
  EXPECT_EQ(error(Mistake::kWaitsForTooFew), "");
  for (const float x : out_) ASSERT_TRUE(std::isnan(x));
}

TEST_F(WgmmaMistakes, OfRegisters) {
  EXPECT_CONTAINS(error(Mistake::kNoFence),
                  "wgmma without a wgmma_fence before the thread's first [block (0,0,0) thread");
  EXPECT_EQ(error(Mistake::kAWritten),
            "the registers of a were written while a wgmma product was under way [block (0,0,0) "
            "thread (37,0,0)]");
  EXPECT_EQ(error(Mistake::kAWrittenAfterFence),
            "wgmma: the registers of a were written after the last wgmma_fence [block (0,0,0) "
            "thread (37,0,0)]");
  EXPECT_EQ(error(Mistake::kSumsWritten),
            "the sums of a wgmma product were written while it was under way [block (0,0,0) thread "
            "(37,0,0)]");
  EXPECT_CONTAINS(error(Mistake::kSumsWrittenAfterFence),
                  "wgmma: the sums were written after the last wgmma_fence [block (0,0,0) thread");
}

TEST_F(WgmmaMistakes, OfTheDescriptor) {
  EXPECT_CONTAINS(error(Mistake::kSwizzleMode),
                  "wgmma: the descriptor has swizzle mode 2; the host knows 1 (128 bytes) [block");
  EXPECT_CONTAINS(error(Mistake::kBaseOffset), "the descriptor has base offset 5, not 0");
  EXPECT_CONTAINS(error(Mistake::kUnevenStart), "the descriptor has a start that is not an even");
  EXPECT_CONTAINS(error(Mistake::kNotTheFirstRow),
                  "a start that is not an even chunk of a row "
                  "whose number is a multiple of 8");
  EXPECT_CONTAINS(error(Mistake::kInsideARow),
                  "a start inside a row, of a matrix whose rows are b's");
  EXPECT_CONTAINS(error(Mistake::kPastTheEnd), "wgmma reads past the end of shared memory");
  EXPECT_CONTAINS(error(Mistake::kDescriptorOfALane),
                  "divergence: lanes of one warp have different operands for wgmma");
  EXPECT_CONTAINS(error(Mistake::kDescriptorOfAWarp),
                  "divergence: warps of one warpgroup have different operands for wgmma");
}

TEST_F(WgmmaMistakes, OfTheWarpgroup) {
  for_each_order([&] {
    EXPECT_CONTAINS(error(Mistake::kLaneSkips), "divergence: lanes of one warp are at");
    EXPECT_CONTAINS(error(Mistake::kLaneSkipsFence), "divergence: lanes of one warp are at");
    EXPECT_CONTAINS(error(Mistake::kWarpWaits), "deadlock: 128 of 128 threads wait");
    const std::string returned = error(Mistake::kWarpReturns);
    EXPECT_TRUE(returned.find("wgmma needs four whole warps, 0 to 3; warp 3 is not whole or has "
                              "returned [block") != std::string::npos ||
                returned.find("the thread returned while others of its warpgroup wait for it at "
                              "wgmma [block") != std::string::npos)
        << returned;
    EXPECT_CONTAINS(error(Mistake::kWarpReturnsLater), "returned");
    EXPECT_CONTAINS(error(Mistake::kNone, 96), "wgmma needs four whole warps, 0 to 3; warp 3 is");
    EXPECT_CONTAINS(error(Mistake::kNone, 120), "needs all 32 lanes of the warp");
  });
}

TEST_F(WgmmaMistakes, OfTheDevice) {
  cuda_on_host::options().compute_capability = 80;
  EXPECT_CONTAINS(error(Mistake::kNone), "fence.proxy.async needs compute capability 9.0");
  EXPECT_CONTAINS(error(Mistake::kNoProxyFence), "needs compute capability 9.0");
  cuda_on_host::options().compute_capability = 100;
  EXPECT_CONTAINS(error(Mistake::kNone),
                  "wgmma_fence needs compute capability 9.0; options().compute_capability is 100");
}

}  // namespace
