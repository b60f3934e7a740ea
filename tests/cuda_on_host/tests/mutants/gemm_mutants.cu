// A kernel with all the means of a real one, and the mistakes that are made with them. Its argument
// plants one of them; tests/python/test_cuda_on_host.py holds that each is found by one build at
// least, and nothing in the kernel as it is.
//
// c = a b, and the sum of c's squares: a persistent loop over 32 x 32 tiles; a and b come through a
// swizzled double buffer of cp.async; each warp turns its part of c through shared memory into
// 16-byte stores; a tile's squares are summed by shuffles and shared memory, the tiles' sums by the
// block that ends last.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "core/device.h"

namespace {

using namespace vllm_lite;
using namespace vllm_lite::device;

enum class Mutant {
  kNone,
  kReadsPastRows,         // rows of a past the end are read
  kWritesPastRows,        // rows of c past the end are written
  kTailNotZeroed,         // rows past the end stay as they were in shared memory
  kWaitsForTooFew,        // the tile in use may still be on its way
  kNoCommit,              // the prefetched tile joins the next group
  kNoBarrierAfterWait,    // others' copies are read without a barrier
  kNoBarrierBeforeReuse,  // a buffer is overwritten while others read it
  kNoBarrierBeforeSums,   // partial sums are read before they are there
  kDivergentBarrier,      // one warp skips a barrier
  kEarlyReturn,           // threads return before a barrier
  kDivergentShuffle,      // half of the lanes skip a shuffle of all
  kShuffleTooFew,         // a step of the reduction is missing
  kNoSyncwarp,            // lanes read what others write without __syncwarp
  kSharedOverrun,         // one element past a static shared array
  kDynamicTooSmall,       // the launch asks for 64 bytes less than the kernel uses
  kMisalignedLdmatrix,
  kMisalignedCopy,
  kCopyInFlight,   // the thread returns before its copies are done
  kNoFence,        // results of other blocks are read without a fence
  kPlainCounter,   // blocks count themselves without an atomic
  kBankConflicts,  // no swizzle: right, but slow
  kCount
};

struct Params {
  const BFloat16* a;  // [m, k]
  const BFloat16* b;  // [k, n]
  float* c;           // [m, n]
  float* tile_sums;   // [tiles]
  float* sum;
  unsigned* blocks_done;
  int m, n, k;
  Mutant mutant;
};

constexpr int kTile = 32;
constexpr int kThreads = 128;  // 2 x 2 warps of 16 x 16
constexpr int kStages = 2;
constexpr int kChunk = 8;  // elements in 16 bytes
constexpr int kChunksPerRow = kTile / kChunk;
constexpr int kTileElements = kTile * kTile;
constexpr int kSharedBytes = kStages * 2 * kTileElements * static_cast<int>(sizeof(BFloat16));

// Two rows of 64 bytes are all banks; eight rows at one column are on eight different places.
__device__ int swizzled(int row, int chunk, Mutant mutant) {
  const int shift = mutant == Mutant::kBankConflicts ? 0 : row / 2 % kChunksPerRow;
  return row * kTile + (chunk ^ shift) * kChunk;
}

__device__ void load_tile(const BFloat16* from, int rows, int stride, BFloat16* to, Mutant mutant) {
  // One 16-byte chunk per thread.
  const int row = static_cast<int>(threadIdx.x) / kChunksPerRow;
  const int chunk = static_cast<int>(threadIdx.x) % kChunksPerRow;
  const bool valid = row < rows || mutant == Mutant::kReadsPastRows;
  if (!valid && mutant == Mutant::kTailNotZeroed) return;
  const BFloat16* source = from + (valid ? row : 0) * stride + chunk * kChunk;
  copy_16_async(to + swizzled(row, chunk, mutant),
                source + (mutant == Mutant::kMisalignedCopy && threadIdx.x == 77 ? 4 : 0), valid);
}

__device__ void multiply_tile(const BFloat16* a, const BFloat16* b, float (&acc)[2][4],
                              Mutant mutant) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int row = warp / 2 * 16, column = warp % 2 * 16;
  for (int k = 0; k < kTile; k += 16) {
    uint32_t a_fragment[4], b_fragments[4];
    load_matrices(a_fragment, a + swizzled(row + lane % 16, k / kChunk + lane / 16, mutant) +
                                  (mutant == Mutant::kMisalignedLdmatrix && lane == 3));
    load_matrices_transposed(b_fragments,
                             b + swizzled(k + lane % 16, column / kChunk + lane / 16, mutant));
    for (int half = 0; half < 2; ++half) {
      const uint32_t b_fragment[2] = {b_fragments[2 * half], b_fragments[2 * half + 1]};
      mma_16x8x16<BFloat16>(acc[half], a_fragment, b_fragment);
    }
  }
}

// Stores the warp's 16 x 16 part in 16-byte pieces, and returns the lane's sum of squares.
__device__ float store_part(const Params& p, int row0, int column0, const float (&acc)[2][4]) {
  constexpr int kPart = 16, kStride = kPart + 4;
  VL_SHARED(float4, parts, [kThreads / 32][kPart * kStride / 4]);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float* part = reinterpret_cast<float*>(parts[warp]);
  float squares = 0.0f;
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 4; ++i) {
      const float x = acc[half][i];
      squares += x * x;
      part[(lane / 4 + i / 2 * 8) * kStride + half * 8 + lane % 4 * 2 + i % 2] = x;
    }
  }
  if (p.mutant != Mutant::kNoSyncwarp) __syncwarp();
  for (int piece = lane; piece < kPart * kPart / 4; piece += 32) {
    const int row = piece / 4, column = piece % 4 * 4;
    if (row0 + row >= p.m && p.mutant != Mutant::kWritesPastRows) continue;
    *reinterpret_cast<float4*>(p.c + (row0 + row) * p.n + column0 + column) =
        *reinterpret_cast<const float4*>(part + row * kStride + column);
  }
  return squares;
}

// The sum over the block, in thread 0.
__device__ float sum_over_block(float x, Mutant mutant) {
  VL_SHARED(float, sums, [kThreads / 32]);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int offset = 16; offset > (mutant == Mutant::kShuffleTooFew ? 1 : 0); offset /= 2) {
    if (mutant == Mutant::kDivergentShuffle && lane >= 16 && offset == 16) continue;
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  if (lane == 0) sums[warp + (mutant == Mutant::kSharedOverrun)] = x;
  if (mutant != Mutant::kNoBarrierBeforeSums) __syncthreads();
  float total = 0.0f;
  if (threadIdx.x == 0) {
    for (const float sum : sums) total += sum;
  }
  return total;
}

__device__ void multiply(const Params& p, int tile, BFloat16* stages) {
  const int tiles_per_row = p.n / kTile, num_k = p.k / kTile;
  const int row0 = tile / tiles_per_row * kTile, column0 = tile % tiles_per_row * kTile;
  const auto prefetch = [&](int k) {
    BFloat16* to = stages + k % kStages * 2 * kTileElements;
    load_tile(p.a + row0 * p.k + k * kTile, p.m - row0, p.k, to, p.mutant);
    load_tile(p.b + k * kTile * p.n + column0, kTile, p.n, to + kTileElements, p.mutant);
  };
  float acc[2][4] = {};
  prefetch(0);
  commit_copies();
  for (int k = 0; k < num_k; ++k) {
    if (k + 1 < num_k) prefetch(k + 1);
    if (p.mutant != Mutant::kNoCommit || k + 1 < num_k) commit_copies();
    if (p.mutant == Mutant::kWaitsForTooFew) {
      wait_copies<2>();
    } else if (p.mutant != Mutant::kCopyInFlight || k + 1 < num_k) {
      wait_copies<1>();
    }
    const bool skips = p.mutant == Mutant::kDivergentBarrier && threadIdx.x < 32 && k == 1;
    if (p.mutant != Mutant::kNoBarrierAfterWait && !skips) __syncthreads();
    if (p.mutant == Mutant::kEarlyReturn && threadIdx.x >= 96 && k + 1 == num_k) {
      wait_copies<0>();
      return;
    }
    const BFloat16* a = stages + k % kStages * 2 * kTileElements;
    multiply_tile(a, a + kTileElements, acc, p.mutant);
    if (p.mutant != Mutant::kNoBarrierBeforeReuse) __syncthreads();
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const float squares = store_part(p, row0 + warp / 2 * 16, column0 + warp % 2 * 16, acc);
  const float total = sum_over_block(squares, p.mutant);
  if (threadIdx.x == 0) p.tile_sums[tile] = total;
}

// The block that ends last adds up what all blocks wrote.
__device__ void add_tile_sums(const Params& p, int num_tiles) {
  if (threadIdx.x != 0) return;
  const bool fence = p.mutant != Mutant::kNoFence;
  if (fence) __threadfence();
  const unsigned before =
      p.mutant == Mutant::kPlainCounter ? (*p.blocks_done)++ : atomicAdd(p.blocks_done, 1u);
  if (before + 1 != gridDim.x) return;
  if (fence) __threadfence();
  float sum = 0.0f;
  for (int tile = 0; tile < num_tiles; ++tile) sum += p.tile_sums[tile];
  *p.sum = sum;
}

__global__ void __launch_bounds__(kThreads) gemm_kernel(const __grid_constant__ Params p) {
  VL_DYNAMIC_SHARED(BFloat16, stages);
  const int num_tiles = (p.m + kTile - 1) / kTile * (p.n / kTile);
  for (int tile = static_cast<int>(blockIdx.x); tile < num_tiles;
       tile += static_cast<int>(gridDim.x)) {
    multiply(p, tile, stages);
  }
  add_tile_sums(p, num_tiles);
}

// ---- the test

bool run_case(int m, int n, int k, Mutant mutant) {
  std::mt19937 random(5);
  std::uniform_int_distribution<int> small(-4, 4);  // all sums are exact
  // Of exactly their sizes, for AddressSanitizer; 16-byte aligned as any allocation.
  std::vector<BFloat16> a(m * k), b(k * n);
  for (BFloat16& x : a) x = from_float<BFloat16>(static_cast<float>(small(random)));
  for (BFloat16& x : b) x = from_float<BFloat16>(static_cast<float>(small(random)));
  std::vector<float> c(m * n, NAN);
  const int num_tiles = (m + kTile - 1) / kTile * (n / kTile);
  std::vector<float> tile_sums(num_tiles, NAN);
  float sum = NAN;
  unsigned blocks_done = 0;
  const int grid = std::min(num_tiles, 4);
  const Params p{a.data(), b.data(), c.data(), tile_sums.data(), &sum, &blocks_done, m,
                 n,        k,        mutant};
  const int shared = kSharedBytes - (mutant == Mutant::kDynamicTooSmall ? 64 : 0);
  VL_LAUNCH(gemm_kernel, grid, kThreads, shared, 0, p);
  double expected_sum = 0;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float expected = 0;
      for (int x = 0; x < k; ++x) expected += to_float(a[i * k + x]) * to_float(b[x * n + j]);
      if (c[i * n + j] != expected) {
        std::printf("c[%d][%d] is %g, not %g\n", i, j, c[i * n + j], expected);
        return false;
      }
      expected_sum += static_cast<double>(expected) * expected;
    }
  }
  if (!(std::fabs(sum - expected_sum) < 1e-5 * expected_sum)) {
    std::printf("the sum of squares is %g, not %g\n", sum, expected_sum);
    return false;
  }
  return true;
}

bool run(Mutant mutant) {
  const bool right = run_case(32, 32, 32, mutant) && run_case(75, 96, 128, mutant) &&
                     run_case(130, 64, 96, mutant);
  const uint64_t conflicts = cuda_on_host::counters().bank_conflicts;
  if (conflicts != 0) std::printf("%lu bank conflicts\n", static_cast<unsigned long>(conflicts));
  return right && conflicts == 0;
}

}  // namespace

// gemm_mutants [number]: exits with 0 if nothing was found.
int main(int argc, char** argv) {
  const int number = argc > 1 ? std::atoi(argv[1]) : 0;
  if (number < 0 || number >= static_cast<int>(Mutant::kCount)) {
    std::printf("%d mutants\n", static_cast<int>(Mutant::kCount) - 1);
    return 2;
  }
  try {
    return run(static_cast<Mutant>(number)) ? 0 : 1;
  } catch (const cuda_on_host::KernelError& error) {
    std::printf("%s\n", error.what());
    return 3;
  }
}
