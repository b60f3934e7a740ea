// A kernel that multiplies by wgmma, and the mistakes that are made with it. Its argument plants
// one of them; tests/python/test_cuda_on_host.py holds that each is found by one build at least,
// and nothing in the kernel as it is.
//
// c = sum over the tiles t of k of a_t b_t / 2^(tiles after t): a warp brings tiles of b through a
// ring of cp.async; two warpgroups of 64 rows each halve their sums and add a_t b_t, a in
// registers. b is [k, n] or transposed.
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
  kNoProxyFence,         // wgmma need not see what cp.async wrote
  kNoWgmmaFence,         // the registers may still be on their way
  kFenceOnce,            // the sums are halved since
  kFenceTooEarly,        // the sums are halved after the fence
  kNoCommit,             // there is no group to wait for
  kNoWgmmaWait,          // the sums are used while they are made
  kWaitsForTooFew,       // the last tile's products may still be under way
  kReleasesBeforeWait,   // a buffer is given back while it is multiplied
  kOneWarpReleases,      // a buffer is given back by one of four warps
  kMultipliesTooEarly,   // nobody waits for the tile
  kArrivesBeforeCopies,  // a tile is handed over before its copies are done
  kLoadsTooEarly,        // a's registers are loaded for the next tile while they are read
  kNoSwizzle,            // rows are stored as they come
  kWrongSwizzle,         // by row / 2
  kWrongColumnBlock,     // the second 64 columns are looked for where the first are
  kWrongStep,            // the second step of k begins one row too far
  kWarpSkipsAProduct,
  kLaneSkipsFence,
  kDynamicTooSmall,  // the launch asks for 64 bytes less than the kernel uses
  kCount
};

constexpr int kTileM = 128, kTileN = 128, kTileK = 64;
constexpr int kStepK = 16;
constexpr int kGroup = 128;
constexpr int kConsumers = 2 * kGroup, kThreads = kConsumers + 32;
constexpr int kStages = 2;
constexpr int kRowElements = 64, kChunk = 8;  // of a swizzled row, and of 16 bytes
constexpr int kTileElements = kTileK * kTileN;
constexpr int kSharedBytes = kStages * kTileElements * static_cast<int>(sizeof(BFloat16));

struct Params {
  const BFloat16* a;  // [kTileM, k]
  const BFloat16* b;  // [k, kTileN] or [kTileN, k]
  float* c;           // [kTileM, kTileN]
  int k;
  Mutant mutant;
};

template <WgmmaB kB>
constexpr int kStoredRows = kB == WgmmaB::kRows ? kTileK : kTileN;
template <WgmmaB kB>
constexpr int kStoredColumns = kB == WgmmaB::kRows ? kTileN : kTileK;

__device__ int swizzled_chunk(int row, int chunk, Mutant mutant) {
  if (mutant == Mutant::kNoSwizzle) return chunk;
  if (mutant == Mutant::kWrongSwizzle) return chunk ^ row / 2 % 8;
  return chunk ^ row % 8;
}

__device__ void wait_for_phase(uint64_t* barrier, int parity) {
  mbarrier_wait(barrier, static_cast<uint32_t>(parity));
}

// By one warp: a tile of b as wgmma_matrix describes it.
template <WgmmaB kB>
__device__ void load_tile(const Params& p, int k, BFloat16* to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int stride = kB == WgmmaB::kRows ? kTileN : p.k;
  const BFloat16* from = p.b + (kB == WgmmaB::kRows ? k * kTileN : k);
  for (int i = lane; i < kTileElements / kChunk; i += 32) {
    const int chunks = kStoredColumns<kB> / kChunk, row = i / chunks, chunk = i % chunks;
    const int block = chunk / 8;
    copy_16_async(to + (block * kStoredRows<kB> + row) * kRowElements +
                      swizzled_chunk(row, chunk % 8, p.mutant) * kChunk,
                  from + row * stride + chunk * kChunk);
  }
  commit_copies();
}

template <WgmmaB kB>
__device__ void produce(const Params& p, BFloat16* stages, uint64_t* full, uint64_t* empty) {
  for (int tile = 0; tile < p.k / kTileK; ++tile) {
    const int stage = tile % kStages;
    wait_for_phase(&empty[stage], (tile / kStages + 1) % 2);  // the first round does not wait
    load_tile<kB>(p, tile * kTileK, stages + stage * kTileElements);
    if (p.mutant == Mutant::kArrivesBeforeCopies) mbarrier_arrive(&full[stage]);
    wait_copies<0>();
    if (p.mutant != Mutant::kNoProxyFence) fence_async_proxy();
    if (p.mutant != Mutant::kArrivesBeforeCopies) mbarrier_arrive(&full[stage]);
  }
}

// The fragments of the group's 64 rows.
__device__ void load_a(const Params& p, int k, uint32_t (&a)[kTileK / kStepK][4]) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  for (int step = 0; step < kTileK / kStepK; ++step) {
    for (int i = 0; i < 4; ++i) {
      const int row = thread / 32 * 16 + lane / 4 + i % 2 * 8;
      const BFloat16* pair = p.a + row * p.k + k + step * kStepK + i / 2 * 8 + lane % 4 * 2;
      a[step][i] = pair[0].bits | static_cast<uint32_t>(pair[1].bits) << 16;
    }
  }
}

template <WgmmaB kB>
__device__ uint64_t matrix_of_step(const BFloat16* tile, int step, Mutant mutant) {
  const bool wrong_block = mutant == Mutant::kWrongColumnBlock;
  const int block_bytes = wrong_block ? 0 : kStoredRows<kB> * kRowElements * 2;
  int offset = step * kStepK * (kB == WgmmaB::kRows ? kRowElements : 1);
  if (mutant == Mutant::kWrongStep && step == 1) offset += kRowElements;
  return wgmma_matrix(tile + offset, block_bytes);
}

template <WgmmaB kB>
__device__ void consume(const Params& p, const BFloat16* stages, uint64_t* full, uint64_t* empty) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const Mutant mutant = p.mutant;
  const int num_tiles = p.k / kTileK;
  float d[kTileN / 8][4] = {};
  uint32_t a[kTileK / kStepK][4];
  const auto fence = [&](int tile) {
    if (mutant == Mutant::kLaneSkipsFence && thread == 70) return;
    if (mutant == Mutant::kNoWgmmaFence || (mutant == Mutant::kFenceOnce && tile > 0)) return;
    wgmma_fence();
  };
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % kStages;
    const bool is_last = tile + 1 == num_tiles;
    if (mutant != Mutant::kLoadsTooEarly || tile == 0) load_a(p, tile * kTileK, a);
    if (mutant == Mutant::kFenceTooEarly) fence(tile);
    for (auto& block : d) {
      for (float& x : block) x *= 0.5f;
    }
    if (mutant != Mutant::kMultipliesTooEarly) wait_for_phase(&full[stage], tile / kStages % 2);
    if (mutant != Mutant::kFenceTooEarly) fence(tile);
    for (int step = 0; step < kTileK / kStepK; ++step) {
      if (mutant == Mutant::kWarpSkipsAProduct && warp == 6 && step == 2) continue;
      wgmma<BFloat16, kB>(d, a[step],
                          matrix_of_step<kB>(stages + stage * kTileElements, step, mutant), true);
    }
    if (mutant != Mutant::kNoCommit) wgmma_commit();
    if (mutant == Mutant::kLoadsTooEarly && !is_last) load_a(p, (tile + 1) * kTileK, a);
    const bool releases = lane == 0 && (mutant != Mutant::kOneWarpReleases || warp % 4 == 0);
    if (mutant == Mutant::kReleasesBeforeWait && releases) mbarrier_arrive(&empty[stage]);
    if (mutant == Mutant::kWaitsForTooFew && is_last) {
      wgmma_wait<1>();
    } else if (mutant != Mutant::kNoWgmmaWait || !is_last) {
      wgmma_wait<0>();
    }
    if (mutant != Mutant::kReleasesBeforeWait && releases) mbarrier_arrive(&empty[stage]);
  }
  for (int i = 0; i < kTileN / 8 * 4; ++i) {
    const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    p.c[row * kTileN + column] = d[i / 4][i % 4];
  }
  if (mutant == Mutant::kNoWgmmaWait || mutant == Mutant::kWaitsForTooFew) wgmma_wait<0>();
}

template <WgmmaB kB>
__global__ void __launch_bounds__(kThreads) wgmma_kernel(const __grid_constant__ Params p) {
  VL_DYNAMIC_SHARED(BFloat16, stages);
  VL_SHARED(uint64_t, full, [kStages]);
  VL_SHARED(uint64_t, empty, [kStages]);
  if (threadIdx.x == 0) {
    const int releases = p.mutant == Mutant::kOneWarpReleases ? 2 : kConsumers / 32;
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&full[stage], 32);
      mbarrier_init(&empty[stage], static_cast<uint32_t>(releases));
    }
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    produce<kB>(p, stages, full, empty);
  } else {
    consume<kB>(p, stages, full, empty);
  }
}

// ---- the test

template <WgmmaB kB>
bool run_case(int k, Mutant mutant) {
  std::mt19937 random(5);
  std::uniform_int_distribution<int> small(-4, 4);  // all sums are exact
  std::vector<BFloat16> a(kTileM * k), b(k * kTileN);
  for (BFloat16& x : a) x = from_float<BFloat16>(static_cast<float>(small(random)));
  for (BFloat16& x : b) x = from_float<BFloat16>(static_cast<float>(small(random)));
  std::vector<float> c(kTileM * kTileN, NAN);
  const int shared = kSharedBytes - (mutant == Mutant::kDynamicTooSmall ? 64 : 0);
  VL_LAUNCH((wgmma_kernel<kB>), 1, kThreads, shared, 0,
            Params{a.data(), b.data(), c.data(), k, mutant});
  for (int row = 0; row < kTileM; ++row) {
    for (int column = 0; column < kTileN; ++column) {
      float expected = 0;
      for (int i = 0; i < k; ++i) {
        if (i % kTileK == 0) expected *= 0.5f;
        const BFloat16 y = kB == WgmmaB::kRows ? b[i * kTileN + column] : b[column * k + i];
        expected += to_float(a[row * k + i]) * to_float(y);
      }
      if (c[row * kTileN + column] == expected) continue;
      std::printf("c[%d][%d] is %g, not %g\n", row, column, c[row * kTileN + column], expected);
      return false;
    }
  }
  return true;
}

template <WgmmaB kB>
bool run(Mutant mutant) {
  return run_case<kB>(kTileK, mutant) && run_case<kB>(5 * kTileK, mutant);
}

}  // namespace

// wgmma_mutants [number]: exits with 0 if nothing was found.
int main(int argc, char** argv) {
  const int number = argc > 1 ? std::atoi(argv[1]) : 0;
  if (number < 0 || number >= static_cast<int>(Mutant::kCount)) {
    std::printf("%d mutants\n", static_cast<int>(Mutant::kCount) - 1);
    return 2;
  }
  cuda_on_host::options().compute_capability = 90;
  try {
    const auto mutant = static_cast<Mutant>(number);
    // b's rows are the harder case, but its columns show a wrong step.
    return run<WgmmaB::kRows>(mutant) && run<WgmmaB::kColumns>(mutant) ? 0 : 1;
  } catch (const cuda_on_host::KernelError& error) {
    std::printf("%s\n", error.what());
    return 3;
  }
}
