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

}  // namespace
