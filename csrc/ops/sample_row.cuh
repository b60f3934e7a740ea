// What the sampler's kernels share: sums and crossings within a block, a segment's elements four at
// a time, and a row with its parameters.
#pragma once

#include <cstdint>

#include "core/device.h"
#include "ops/ops.h"
#include "ops/sample_math.h"
#include "ops/sample_workspace.h"

namespace vllm_lite::sampling {

constexpr int kThreads = 256;        // of a segment
constexpr int kChooseThreads = 512;  // of a row
constexpr int kVectors = kSampleSegment / kThreads / 4;
constexpr int kMaxWarps = kChooseThreads / 32;
constexpr int kDigits = 256;  // of a radix selection
constexpr int kMaxTopIds = 1024;
constexpr int kMaxVocabSize = 1 << 24;  // of an id, select_key looks at the lower 24 bits

struct SampleArgs {
  SampleParams params;
  SampleWorkspace work;
};

enum Job { kDraw, kTopIds };

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// ---- blocks

template <typename T>
__device__ T shuffle_xor(T value, int lanes) {
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) {
    words[i] = __shfl_xor_sync(0xffffffffu, words[i], lanes);
  }
  memcpy(&value, words, sizeof(T));
  return value;
}

// `combine` of every thread's value, for every thread. `scratch` holds one T per warp; the barrier
// at the begin lets it be what a preceding call used.
template <int kNumThreads, typename T, typename Combine>
__device__ T block_reduce(T value, T* scratch, Combine combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, shuffle_xor(value, lanes));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
  for (int warp = 1; warp < kNumThreads / 32; ++warp) value = combine(value, scratch[warp]);
  return value;
}

struct Add {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};

// `combine` of a short array, for every thread.
template <typename T, typename Combine>
__device__ T block_reduce_array(const T* array, int count, T value, T* scratch, Combine combine) {
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) {
      value = combine(value, array[i]);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value = combine(value, shuffle_xor(value, lanes));
    if (threadIdx.x == 0) scratch[0] = value;
  }
  __syncthreads();
  return scratch[0];
}

// In the first kNumThreads threads: the sum of the values of the threads before.
template <int kNumThreads>
__device__ int64_t block_sum_before(int64_t value, int64_t* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const bool takes_part = warp < kNumThreads / 32;
  int64_t sum = value;
  if (takes_part) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const auto below = __shfl_up_sync(0xffffffffu, static_cast<unsigned long long>(sum), lanes);
      if (lane >= lanes) sum += static_cast<int64_t>(below);
    }
  }
  __syncthreads();
  if (takes_part && lane == 31) scratch[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp && takes_part; ++i) sum += scratch[i];
  return sum - value;
}

// Where a running sum over bins reaches a target.
struct Crossing {
  int64_t before;  // sum of the bins before
  int32_t bin;     // the last if the target is never reached
  int32_t reached;
};

struct BlockScratch {
  int64_t sums[kMaxWarps];
  SegmentPeak peaks[kMaxWarps];
  SegmentDraw draws[kMaxWarps];
  Crossing crossing;
};

// The work of the block's first kNumThreads threads.
template <int kNumThreads, int kNumBins, typename Get>
__device__ Crossing find_crossing(BlockScratch& scratch, int64_t target, Get get) {
  constexpr int kPerThread = kNumBins / kNumThreads;
  const int begin = static_cast<int>(threadIdx.x) * kPerThread;
  int64_t sum = 0;
  if (threadIdx.x < kNumThreads) {
    for (int i = begin; i < begin + kPerThread; ++i) sum += get(i);
  }
  int64_t before = block_sum_before<kNumThreads>(sum, scratch.sums);
  if (threadIdx.x == 0) scratch.crossing = {0, kNumBins - 1, 0};
  __syncthreads();
  if (threadIdx.x < kNumThreads && before < target && target <= before + sum) {
    int bin = begin;
    while (before + get(bin) < target) before += get(bin++);
    scratch.crossing = {before, bin, 1};
  }
  __syncthreads();
  return scratch.crossing;
}

__device__ void add(uint64_t* sum, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

// Shared memory adds 32 bits at a time in hardware: a sum is two halves, and whoever makes the low
// one wrap carries. Each of `low` and `high` is complete after a barrier.
__device__ void add_halves(uint32_t* low, uint32_t* high, int64_t value) {
  const uint32_t low_part = static_cast<uint32_t>(value);
  const uint32_t carry = atomicAdd(low, low_part) > ~low_part ? 1 : 0;
  const uint32_t high_part = static_cast<uint32_t>(value >> 32) + carry;
  if (high_part > 0) atomicAdd(high, high_part);
}
__device__ int64_t join_halves(uint32_t low, uint32_t high) {
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}

// ---- a segment's elements, four at a time

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T v[4];
};

__device__ int segment_begin() { return static_cast<int>(blockIdx.x) * kSampleSegment; }
// The first id of this thread's vector.
__device__ int vector_begin(int vector) {
  return segment_begin() + (vector * kThreads + static_cast<int>(threadIdx.x)) * 4;
}

// x[i ... i + 3]; `fill` beyond the row's end.
template <typename T>
__device__ Four<T> load_four(const T* x, int i, int size, T fill) {
  if (i + 4 <= size && reinterpret_cast<uintptr_t>(x + i) % sizeof(Four<T>) == 0) {
    return *reinterpret_cast<const Four<T>*>(x + i);
  }
  Four<T> four;
#pragma unroll
  for (int j = 0; j < 4; ++j) four.v[j] = i + j < size ? x[i + j] : fill;
  return four;
}

struct Segment {
  Four<float> vectors[kVectors];

  __device__ Segment(const float* x, int size) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors[i] = load_four(x, vector_begin(i), size, -infinity());
    }
  }
  // f(id, x[id], index), index below kSampleSegment / kThreads; in ascending order. Ids beyond the
  // row's end come with -inf.
  template <typename F>
  __device__ void for_each(F f) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) f(vector_begin(i) + j, vectors[i].v[j], i * 4 + j);
    }
  }
};

// ---- a row

struct BestLogit {
  float value = -infinity();
  int32_t id = -1;
  bool broken = false;

  // Ids come in ascending order.
  __device__ void add(int candidate, float x) {
    if (!(x < infinity())) broken = true;
    if (x > value) {
      value = x;
      id = candidate;
    }
  }
  __device__ uint64_t key() const {
    return broken ? kBrokenKey : id < 0 ? kNoKey : Key(value, id).bits;
  }
};

struct LeastKeys {
  __device__ SegmentPeak operator()(const SegmentPeak& a, const SegmentPeak& b) const {
    return {a.raw < b.raw ? a.raw : b.raw, a.processed < b.processed ? a.processed : b.processed};
  }
};

// One row of the call: its parameters and what it needs done.
struct Row {
  const SampleParams& params;
  const SampleWorkspace& work;
  int index;
  int state;

  __device__ Row(const SampleArgs& args, int row)
      : params(args.params), work(args.work), index(row), state(args.params.rows[row]) {}

  __device__ bool has_state() const { return state >= 0 && state < params.max_rows; }
  __device__ int64_t state_offset() const {
    return static_cast<int64_t>(state) * params.vocab_size;
  }
  __device__ const float* raw() const { return params.logits + index * params.logits_stride; }
  __device__ float* copy() const { return work.logits + index * work.logits_stride; }

  __device__ const RowState& kept() const { return params.row_state[state]; }
  __device__ const RowSampling& sampling() const { return kept().sampling; }
  __device__ IdLists lists() const {
    return IdLists(params.id_lists + state * params.id_lists_stride, kept());
  }
  __device__ bool biased() const { return params.id_lists != nullptr && kept().num_bias > 0; }
  __device__ bool restricted() const {
    return params.id_lists != nullptr && kept().num_allowed > 0;
  }
  __device__ bool without_stop() const {
    return params.id_lists != nullptr && kept().num_stop > 0 &&
           params.positions[index] < sampling().min_total_tokens;
  }
  __device__ const uint32_t* token_mask() const {
    return token_mask_of(params.token_masks, params.mask_index, params.num_masks, index,
                         params.vocab_size);
  }
  __device__ bool with_penalties() const {
    return params.output_counts != nullptr &&
           (sampling().repetition_penalty != 1.0f || sampling().presence_penalty != 0.0f ||
            sampling().frequency_penalty != 0.0f);
  }
  __device__ const float* processed() const {
    const bool changed =
        biased() || restricted() || token_mask() != nullptr || without_stop() || with_penalties();
    return changed ? copy() : raw();
  }

  __device__ bool greedy() const { return !(sampling().temperature > 0.0f); }
  __device__ float scale() const { return temperature_scale(sampling().temperature); }
  __device__ bool cut_k() const {
    return sampling().top_k > 0 && sampling().top_k < params.vocab_size;
  }
  __device__ bool cut_p() const { return sampling().top_p < 1.0f; }
  __device__ float min_scaled() const {
    const float min_p = sampling().min_p;
    return min_p > 0.0f ? least_scaled(min_p) : -infinity();
  }
  __device__ uint32_t position() const { return static_cast<uint32_t>(params.positions[index]); }
  __device__ uint64_t seed() const { return seed_of(sampling()); }

  __device__ bool with_logprobs() const { return sampling().num_logprobs >= 0; }
  __device__ int num_top_ids() const {
    if (params.top_ids == nullptr) return 0;
    return min(min(sampling().num_logprobs, params.max_logprobs), params.vocab_size);
  }

  __device__ int64_t first_segment() const {
    return static_cast<int64_t>(index) * work.num_segments;
  }
  __device__ SegmentPeak peak(BlockScratch& scratch) const {
    return block_reduce_array(work.peaks + first_segment(), work.num_segments,
                              SegmentPeak{kNoKey, kNoKey}, scratch.peaks, LeastKeys());
  }

  __device__ int64_t list(Job job) const {
    return static_cast<int64_t>(job) * params.num_rows + index;
  }
  __device__ int64_t* sums(Job job) const { return work.sums + list(job) * work.num_segments; }
  __device__ uint64_t* bins(Job job) const { return work.bins + list(job) * kSampleBins; }
  __device__ int32_t* num_ids(Job job) const { return work.num_ids + list(job); }
  __device__ int32_t* ids(Job job) const { return work.ids + list(job) * kSampleListCapacity; }

  __device__ int64_t sum(Job job, BlockScratch& scratch) const {
    return block_reduce_array(sums(job), work.num_segments, int64_t{0}, scratch.sums, Add());
  }
};

// What a row that failed has for its token.
__device__ int32_t failure(const SegmentPeak& peak) {
  const bool all_masked = peak.raw != kBrokenKey && peak.raw != kNoKey && peak.processed == kNoKey;
  return all_masked ? kAllMaskedToken : kFailedToken;
}

__device__ bool failed(const SegmentPeak& peak) {
  return peak.raw == kBrokenKey || peak.processed == kBrokenKey || peak.raw == kNoKey ||
         peak.processed == kNoKey;
}

}  // namespace vllm_lite::sampling
