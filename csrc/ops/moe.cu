// Around the experts' matrix products. Every result has one order of work, whatever the launch: no
// atomics.
#include "core/chunk.h"
#include "ops/moe.h"

namespace vllm_lite {
namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr uint32_t kAllLanes = 0xffffffffu;

// ---- route_experts: a warp per token, its logits in registers

constexpr int kRouteThreads = 128;

// Larger for a larger logit, and for a lower id among equals; never 0.
__device__ __forceinline__ uint64_t rank_key(float logit, int id) {
  // Order of the bits is order of the values: negative ones are turned around, -0 is 0.
  const uint32_t bits = __float_as_uint(logit == 0.0f ? 0.0f : logit);
  uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  if (logit != logit) ordered = 1;
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

__device__ __forceinline__ uint64_t max_of_warp(uint64_t key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint32_t high = __shfl_xor_sync(kAllLanes, static_cast<uint32_t>(key >> 32), offset);
    const uint32_t low = __shfl_xor_sync(kAllLanes, static_cast<uint32_t>(key), offset);
    const uint64_t other = uint64_t{high} << 32 | low;
    key = other > key ? other : key;
  }
  return key;
}

// kPerLane: experts per lane; expert i * 32 + lane is a lane's i-th.
template <typename T, int kPerLane>
__global__ void __launch_bounds__(kRouteThreads)
    route_experts_kernel(const __grid_constant__ RouteExpertsParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t token = int64_t{blockIdx.x} * (kRouteThreads / 32) + threadIdx.x / 32;
  if (token >= p.num_tokens) return;  // a whole warp
  const T* row = static_cast<const T*>(p.logits) + token * p.logits_stride;
  float logits[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * 32 + lane;
    logits[i] = expert < p.num_experts ? to_float(row[expert]) : 0.0f;
  }

  // Lane c keeps choice c.
  float chosen_logit = 0.0f, largest = 0.0f;
  int chosen_id = 0;
  uint32_t taken = 0;  // bit i: logits[i] is chosen
  for (int choice = 0; choice < p.k; ++choice) {
    uint64_t best = 0;
    float best_logit = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = i * 32 + lane;
      if (expert >= p.num_experts || (taken >> i & 1)) continue;
      const uint64_t key = rank_key(logits[i], expert);
      if (key > best) {
        best = key;
        best_logit = logits[i];
      }
    }
    best = max_of_warp(best);
    const int id = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    if (id % 32 == lane) taken |= 1u << (id / 32);
    const float logit = __shfl_sync(kAllLanes, best_logit, id % 32);
    if (choice == 0) largest = logit;
    if (lane == choice) {
      chosen_logit = logit;
      chosen_id = id;
    }
  }

  const float chosen = lane < p.k ? expf(chosen_logit - largest) : 0.0f;
  float sum = 0.0f;
  if (p.renormalize) {
    sum = chosen;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * 32 + lane < p.num_experts) sum += expf(logits[i] - largest);
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  if (lane < p.k) {
    p.weights[token * p.k + lane] = chosen / sum;
    p.ids[token * p.k + lane] = chosen_id;
  }
}

// ---- permute_tokens: a block per expert, which reads all ids twice: one launch without scratch
// memory. For 128 experts and 8192 tokens of 8 choices that is 67 MB, from the L2 cache.

constexpr int kPermuteThreads = 512;

// The sum over the block's threads of `count`, and the sum over those before this thread.
__device__ __forceinline__ void count_in_block(int count, int& before, int& total) {
  constexpr int kWarps = kPermuteThreads / 32;
  VL_SHARED(int, warp_counts, [kWarps]);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = count;  // of the lanes up to this one
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();  // the last call's counts are read
  if (lane == 31) warp_counts[warp] = sum;
  __syncthreads();
  before = sum - count;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_counts[w];
    total += warp_counts[w];
  }
}

// Block num_experts takes the ids of other ranks.
__global__ void __launch_bounds__(kPermuteThreads)
    permute_tokens_kernel(const __grid_constant__ PermuteTokensParams p) {
  const int expert = static_cast<int>(blockIdx.x);
  const auto expert_of = [&](int pair) {
    const int id = p.ids[pair];
    return id >= 0 && id < p.num_experts ? id : p.num_experts;
  };
  int lower = 0;
#pragma unroll 8
  for (int pair = static_cast<int>(threadIdx.x); pair < p.num_pairs; pair += kPermuteThreads) {
    lower += expert_of(pair) < expert;
  }
  int before = 0, next = 0;  // the expert's next row
  count_in_block(lower, before, next);
  if (threadIdx.x == 0) p.expert_start[expert] = next;
  // A thread takes kBatch neighbours, so that a barrier serves many pairs.
  constexpr int kBatch = 8;
  for (int begin = 0; begin < p.num_pairs; begin += kPermuteThreads * kBatch) {
    const int first = begin + static_cast<int>(threadIdx.x) * kBatch;
    uint32_t mine = 0;  // bit i: pair first + i is the expert's
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < p.num_pairs && expert_of(first + i) == expert) mine |= 1u << i;
    }
    int total = 0;
    count_in_block(__popc(mine), before, total);
    int row = next + before;
    next += total;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if ((mine >> i & 1) == 0) continue;
      p.order[row] = first + i;
      p.rows[first + i] = expert < p.num_experts ? row : -1;
      ++row;
    }
  }
}

// ---- gather_rows: a block per row

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ GatherRowsParams p, int units_per_row) {
  const int row = static_cast<int>(blockIdx.x);
  const int token = p.order[row] / p.k;
  if (p.order[row] < 0 || token >= p.num_tokens) return;
  const Unit* from =
      reinterpret_cast<const Unit*>(static_cast<const char*>(p.input) + token * p.input_stride);
  Unit* to = reinterpret_cast<Unit*>(static_cast<char*>(p.out) + row * p.out_stride);
  constexpr int kUnits = 4;  // per thread, on their way together
  const int threads = static_cast<int>(blockDim.x);
  for (int begin = static_cast<int>(threadIdx.x); begin < units_per_row;
       begin += threads * kUnits) {
    Unit units[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (begin + i * threads < units_per_row) units[i] = from[begin + i * threads];
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (begin + i * threads < units_per_row) to[begin + i * threads] = units[i];
    }
  }
}

// ---- combine_experts: the chunks of all tokens are numbered through, a thread per chunk

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    combine_experts_kernel(const __grid_constant__ CombineExpertsParams p,
                           uint32_t chunks_per_token, uint32_t total_chunks) {
  constexpr int kSize = Chunk<T>::kSize;
  const uint32_t chunk = blockIdx.x * kThreads + threadIdx.x;
  if (chunk >= total_chunks) return;
  const int64_t token = chunk / chunks_per_token;
  const int first = static_cast<int>(chunk % chunks_per_token) * kSize, count = p.size - first;
  const int32_t* rows = p.rows + token * p.k;
  const float* weights = p.weights + token * p.k;
  Chunk<float, kSize> sums = {};
#pragma unroll 4
  for (int choice = 0; choice < p.k; ++choice) {
    const int64_t row = rows[choice];
    const bool exists = row >= 0 && row < p.num_rows;
    const T* from = static_cast<const T*>(p.expert_rows) + row * p.expert_rows_stride + first;
    const auto values = to_floats(load_chunk<kAligned>(from, exists ? count : 0));
    // A row that is left out has no weight either: NaN times 0 is NaN.
    const float weight = exists ? weights[choice] : 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      sums.values[i] = fmaf(weight, values.values[i], sums.values[i]);
    }
  }
  store_chunk<kAligned>(static_cast<T*>(p.out) + token * p.out_stride + first, from_floats<T>(sums),
                        count);
}

template <typename Unit>
void launch_gather(const GatherRowsParams& p) {
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const uint32_t threads =
      static_cast<uint32_t>(units < kThreads ? (units + 31) / 32 * 32 : kThreads);
  VL_LAUNCH((gather_rows_kernel<Unit>), p.num_rows, threads, 0, p.stream, p,
            static_cast<int>(units));
}

}  // namespace

void route_experts_cuda(const RouteExpertsParams& p) {
  if (p.num_tokens == 0 || p.k == 0) return;
  constexpr int kWarps = kRouteThreads / 32;
  const uint32_t blocks = static_cast<uint32_t>((p.num_tokens - 1) / kWarps + 1);
  dispatch_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.num_experts <= 128) {
      VL_LAUNCH((route_experts_kernel<T, 4>), blocks, kRouteThreads, 0, p.stream, p);
    } else {
      VL_LAUNCH((route_experts_kernel<T, kMaxExperts / 32>), blocks, kRouteThreads, 0, p.stream, p);
    }
  });
}

void permute_tokens_cuda(const PermuteTokensParams& p) {
  VL_CHECK(p.num_pairs <= INT32_MAX / 2, "permute_tokens: more than 2^30 pairs");
  VL_LAUNCH((permute_tokens_kernel), p.num_experts + 1, kPermuteThreads, 0, p.stream, p);
}

void gather_rows_cuda(const GatherRowsParams& p) {
  if (p.num_rows == 0 || p.row_bytes == 0) return;
  VL_CHECK(p.row_bytes <= INT32_MAX / 2, "gather_rows: a row is larger than 2^30 bytes");
  const bool aligned =
      is_aligned<uint8_t>({p.out, p.input}, {p.row_bytes, p.out_stride, p.input_stride});
  if (aligned) return launch_gather<Chunk<uint32_t>>(p);
  launch_gather<uint8_t>(p);
}

void combine_experts_cuda(const CombineExpertsParams& p) {
  if (p.num_tokens == 0 || p.size == 0) return;
  dispatch_dtype(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t per_token = num_chunks<T>(p.size), total = p.num_tokens * per_token;
    VL_CHECK(total <= INT32_MAX, "combine_experts: more than 2^31 - 1 chunks of 16 bytes");
    const bool aligned =
        is_aligned<T>({p.out, p.expert_rows}, {p.size, p.out_stride, p.expert_rows_stride});
    dispatch_bool(aligned, [&](auto is_true) {
      VL_LAUNCH((combine_experts_kernel<T, is_true>),
                static_cast<uint32_t>((total + kThreads - 1) / kThreads), kThreads, 0, p.stream, p,
                static_cast<uint32_t>(per_token), static_cast<uint32_t>(total));
    });
  });
}

}  // namespace vllm_lite
