// The sampler on CUDA: sample_cpu's results bit for bit.
//
// A row is cut into segments, one block each, so that even one row fills many multiprocessors. What
// blocks hand on are minima, counts and sums of integers: no result depends on their order. Five
// kernels, whose shapes depend on num_rows, vocab_size and which results are asked for alone, so
// that a CUDA graph may hold them; blocks of rows that need nothing of a kernel leave at once:
//   prepare  bias, masks and penalties into a copy, for rows that have any; the likeliest token
//   weigh    rows without top_k and top_p: the draw. Others: a histogram, by distance to the peak,
//            of the number of tokens (top_k) or of their weights (top_p)
//   collect  lists the ids of the bins that hold the survivors
//   choose   one block per row: the exact cut by radix selection on the list, the draw, the results
//   rank     counts the logits above the chosen one
// prepare, weigh, collect and rank read a row once each: 64 rows of 152k logits are 39 MB, 10 us at
// 4 TB/s or less where the L2 holds them.
#include <cstdint>

#include "core/check.h"
#include "core/device.h"
#include "ops/ops.h"
#include "ops/sample_math.h"
#include "ops/sample_workspace.h"

namespace vllm_lite {
namespace {

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

__device__ bool has_list(const int32_t* start, int row) {
  return start != nullptr && start[row] < start[row + 1];
}

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

  __device__ bool biased() const { return has_list(params.bias_start, index); }
  __device__ bool restricted() const { return has_list(params.allowed_start, index); }
  __device__ bool without_stop() const {
    return has_list(params.stop_start, index) &&
           params.positions[index] < params.min_total_tokens[state];
  }
  __device__ bool with_penalties() const {
    return params.output_counts != nullptr &&
           (params.repetition_penalty[state] != 1.0f || params.presence_penalty[state] != 0.0f ||
            params.frequency_penalty[state] != 0.0f);
  }
  __device__ const float* processed() const {
    return biased() || restricted() || without_stop() || with_penalties() ? copy() : raw();
  }

  __device__ bool greedy() const { return !(params.temperature[state] > 0.0f); }
  __device__ float scale() const { return temperature_scale(params.temperature[state]); }
  __device__ bool cut_k() const {
    return params.top_k[state] > 0 && params.top_k[state] < params.vocab_size;
  }
  __device__ bool cut_p() const { return params.top_p[state] < 1.0f; }
  __device__ float min_scaled() const {
    const float min_p = params.min_p[state];
    return min_p > 0.0f ? least_scaled(min_p) : -infinity();
  }
  __device__ uint32_t position() const { return static_cast<uint32_t>(params.positions[index]); }
  __device__ uint64_t seed() const { return params.seeds[state]; }

  __device__ bool with_logprobs() const { return params.num_logprobs[state] >= 0; }
  __device__ int num_top_ids() const {
    if (params.top_ids == nullptr) return 0;
    return min(min(params.num_logprobs[state], params.max_logprobs), params.vocab_size);
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

__device__ bool failed(const SegmentPeak& peak) {
  return peak.raw == kBrokenKey || peak.processed == kBrokenKey || peak.raw == kNoKey ||
         peak.processed == kNoKey;
}

// ---- prepare

// Whether ids of the segment are masked, one bit each.
struct Mask {
  uint32_t bits[kSampleSegment / 32];

  __device__ void fill(uint32_t value) {
    for (int i = static_cast<int>(threadIdx.x); i < kSampleSegment / 32; i += kThreads) {
      bits[i] = value;
    }
    __syncthreads();
  }
  // Sets or clears the bits of list entries that lie in the segment.
  __device__ void change(const int32_t* ids, int begin, int end, bool masked) {
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kThreads) {
      const int64_t place = static_cast<int64_t>(ids[i]) - segment_begin();
      if (place < 0 || place >= kSampleSegment) continue;
      const uint32_t bit = 1u << (place % 32);
      if (masked) {
        atomicOr(&bits[place / 32], bit);
      } else {
        atomicAnd(&bits[place / 32], ~bit);
      }
    }
    __syncthreads();
  }
  __device__ bool masked(int id) const {
    const int place = id - segment_begin();
    return (bits[place / 32] >> (place % 32) & 1) != 0;
  }
};

// Adds the row's bias to its copy. A thread does all of an id's entries, in their order.
__device__ void add_bias(const Row& row) {
  const SampleParams& params = row.params;
  for (int i = params.bias_start[row.index]; i < params.bias_start[row.index + 1]; ++i) {
    const int id = params.bias_ids[i];
    const int64_t place = static_cast<int64_t>(id) - segment_begin();
    if (place < 0 || place >= kSampleSegment || id >= params.vocab_size) continue;
    if (place / 4 % kThreads == threadIdx.x) row.copy()[id] += params.bias_values[i];
  }
}

// Writes the segment of the row's copy; returns its best.
__device__ BestLogit process_segment(const Row& row, const Segment& segment, Mask& mask) {
  const SampleParams& params = row.params;
  const int size = params.vocab_size;
  const float* from = row.raw();
  float* to = row.copy();
  if (row.biased()) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (vector_begin(i) < size) {
        *reinterpret_cast<Four<float>*>(to + vector_begin(i)) = segment.vectors[i];
      }
    }
    add_bias(row);
    from = to;
  }
  const bool restricted = row.restricted(), without_stop = row.without_stop();
  const bool with_mask = restricted || without_stop;
  if (with_mask) mask.fill(restricted ? ~0u : 0u);
  if (restricted) {
    mask.change(params.allowed_ids, params.allowed_start[row.index],
                params.allowed_start[row.index + 1], false);
  }
  if (without_stop) {
    mask.change(params.stop_ids, params.stop_start[row.index], params.stop_start[row.index + 1],
                true);
  }
  const bool with_penalties = row.with_penalties();
  const float repetition = params.repetition_penalty[row.state];
  const float frequency = params.frequency_penalty[row.state];
  const float presence = params.presence_penalty[row.state];
  BestLogit best;
#pragma unroll 2
  for (int i = 0; i < kVectors; ++i) {
    const int begin = vector_begin(i);
    if (begin >= size) break;
    Four<float> x = load_four(from, begin, size, -infinity());
    if (with_mask) {
      for (int j = 0; j < 4; ++j) {
        if (mask.masked(begin + j)) x.v[j] = -infinity();
      }
    }
    if (with_penalties) {
      const Four<int32_t> counts =
          load_four<int32_t>(params.output_counts + row.state_offset(), begin, size, 0);
      const Four<uint8_t> in_prompt =
          load_four<uint8_t>(params.prompt_mask + row.state_offset(), begin, size, 0);
      for (int j = 0; j < 4; ++j) {
        x.v[j] =
            penalized(x.v[j], counts.v[j], in_prompt.v[j] != 0, repetition, frequency, presence);
      }
    }
    for (int j = 0; j < 4; ++j) {
      if (begin + j < size) best.add(begin + j, x.v[j]);
    }
    *reinterpret_cast<Four<float>*>(to + begin) = x;
  }
  return best;
}

__global__ void __launch_bounds__(kThreads)
    sample_prepare_kernel(const __grid_constant__ SampleArgs args) {
  VL_SHARED(BlockScratch, scratch, [1]);
  VL_SHARED(Mask, mask, [1]);
  const Row row(args, static_cast<int>(blockIdx.y));
  for (int job = 0; job < kSampleJobs; ++job) {
    uint64_t* bins = row.bins(static_cast<Job>(job));
    for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < kSampleBins;
         i += gridDim.x * kThreads) {
      bins[i] = 0;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *row.num_ids(static_cast<Job>(job)) = 0;
  }
  if (!row.has_state()) return;
  const Segment segment(row.raw(), args.params.vocab_size);
  BestLogit best;
  segment.for_each([&](int id, float x, int) { best.add(id, x); });
  SegmentPeak mine = {best.key(), best.key()};
  if (row.processed() != row.raw()) {
    mine.processed = process_segment(row, segment, mask[0]).key();
  }
  mine = block_reduce<kThreads>(mine, scratch[0].peaks, LeastKeys());
  if (threadIdx.x == 0) {
    args.work.peaks[row.first_segment() + blockIdx.x] = mine;
  }
}

// ---- weigh and collect

// What a job selects from a row, likeliest first.
struct Selection {
  const float* x;
  float max;
  float scale;      // of the distances that choose the bins, and of the weights
  int64_t count;    // of tokens, or
  bool by_weight;   // what top_p holds of all weights
  bool with_sum;    // all weights are to be added up
  bool take_all;    // logits of -inf, too
  float most_away;  // by_weight: the scaled distance from which on tokens do not matter
};

// Tokens so unlikely that all of them together weigh less than top_p leaves out: each less than
// 0.15 of the average share. Where that is not much above a weight's unit, none but those that
// weigh nothing.
__device__ float negligible_distance(float top_p, int vocab_size) {
  const float away = logf(static_cast<float>(vocab_size) / (1.0f - fmaxf(top_p, 0.0f))) + 2.0f;
  return away < 26.0f ? away : 32.0f;
}

// False: there is nothing to select.
__device__ bool selection_of(const Row& row, Job job, const SegmentPeak& peak, Selection* out) {
  if (job == kTopIds) {
    if (!row.with_logprobs()) return false;
    *out = {row.raw(), Key(peak.raw).logit(), 1.0f, row.num_top_ids(), false, true, true, 0.0f};
    return true;
  }
  if (row.greedy() || (!row.cut_k() && !row.cut_p())) return false;
  *out = {row.processed(), Key(peak.processed).logit(), 1.0f, 0, false, false, false, 0.0f};
  if (row.cut_k()) {
    out->count = row.params.top_k[row.state];
  } else {
    out->scale = row.scale();
    out->by_weight = out->with_sum = true;
    out->most_away = negligible_distance(row.params.top_p[row.state], row.params.vocab_size);
  }
  return true;
}

// Bins widen with the distance to the peak, 128 to an octave of 1 + distance, so that any scale of
// logits finds its way. Never falls as the logit falls.
__device__ int bin_of(float scaled) {
  const int bin = static_cast<int>((__float_as_uint(1.0f - scaled) - 0x3f800000u) >> 16);
  return min(bin, kSampleBins - 1);
}

struct Bins {
  uint32_t low[kSampleBins], high[kSampleBins];
};

__device__ void fill_bins(const Row& row, Job job, const Selection& selection, Bins& bins,
                          BlockScratch& scratch) {
  const bool with_bins = selection.by_weight || selection.count > 0;
  if (with_bins) {
    for (int i = static_cast<int>(threadIdx.x); i < kSampleBins; i += kThreads) {
      bins.low[i] = bins.high[i] = 0;
    }
    __syncthreads();
  }
  const int size = row.params.vocab_size;
  const Segment segment(selection.x, size);
  int64_t sum = 0;
  segment.for_each([&](int id, float x, int) {
    const float scaled = (x - selection.max) * selection.scale;
    const int64_t weight = selection.with_sum ? weight_of(scaled) : 0;
    sum += weight;
    if (!with_bins || id >= size) return;
    if (selection.by_weight) {
      if (weight > 0 && -scaled <= selection.most_away) {
        add_halves(&bins.low[bin_of(scaled)], &bins.high[bin_of(scaled)], weight);
      }
    } else if (x > -infinity() || selection.take_all) {
      atomicAdd(&bins.low[bin_of(scaled)], 1u);
    }
  });
  if (selection.with_sum) {
    sum = block_reduce<kThreads>(sum, scratch.sums, Add());
    if (threadIdx.x == 0) row.sums(job)[blockIdx.x] = sum;
  }
  if (!with_bins) return;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kSampleBins; i += kThreads) {
    const int64_t value = join_halves(bins.low[i], bins.high[i]);
    if (value > 0) add(row.bins(job) + i, static_cast<uint64_t>(value));
  }
}

// The score that a token must beat: the peak survives every cut.
__device__ SegmentDraw peak_draw(const Row& row, uint64_t peak) {
  const int32_t id = Key(peak).id();
  return {gumbel(philox_word(row.seed(), row.position(), id)), id};
}

struct BetterDraw {
  __device__ SegmentDraw operator()(const SegmentDraw& a, const SegmentDraw& b) const {
    return a.score > b.score || (a.score == b.score && a.id < b.id) ? a : b;
  }
};

// The best score of the segment's tokens, or the peak's.
__device__ void draw_segment(const Row& row, const SegmentPeak& peak, BlockScratch& scratch) {
  if (threadIdx.x == 0) scratch.draws[0] = peak_draw(row, peak.processed);
  __syncthreads();
  SegmentDraw best = scratch.draws[0];
  const float* x = row.processed();
  const int size = row.params.vocab_size;
  const float max = Key(peak.processed).logit(), scale = row.scale();
  const float min_scaled = row.min_scaled();
  const uint64_t seed = row.seed();
  const uint32_t position = row.position();
  Four<float> next = load_four(x, vector_begin(0), size, -infinity());
#pragma unroll 1
  for (int i = 0; i < kVectors; ++i) {
    const int begin = vector_begin(i);
    const Four<float> four = next;
    if (i + 1 < kVectors) next = load_four(x, vector_begin(i + 1), size, -infinity());
    const float most = fmaxf(fmaxf(four.v[0], four.v[1]), fmaxf(four.v[2], four.v[3]));
    const float most_scaled = (most - max) * scale;
    if (most == -infinity() || most_scaled < min_scaled) continue;
    if (most_scaled + kMaxGumbel < best.score) continue;
    const PhiloxWords noise = philox_words(seed, position, static_cast<uint32_t>(begin) / 4);
    const uint32_t limit = winning_limit(most_scaled - best.score);
    uint32_t candidates = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool candidate = ~noise.word[j] < limit && four.v[j] > -infinity();
      candidates |= static_cast<uint32_t>(candidate) << j;
    }
#pragma unroll 1
    for (; candidates != 0; candidates &= candidates - 1) {
      const int j = __ffs(static_cast<int>(candidates)) - 1;
      const float value = j == 0 ? four.v[0] : j == 1 ? four.v[1] : j == 2 ? four.v[2] : four.v[3];
      const uint32_t bits = j == 0   ? noise.word[0]
                            : j == 1 ? noise.word[1]
                            : j == 2 ? noise.word[2]
                                     : noise.word[3];
      const float scaled = (value - max) * scale;
      if (scaled < min_scaled) continue;
      best = BetterDraw()(best, {scaled + gumbel(bits), begin + j});
    }
  }
  best = block_reduce<kThreads>(best, scratch.draws, BetterDraw());
  if (threadIdx.x == 0) {
    row.work.draws[row.first_segment() + blockIdx.x] = best;
  }
}

// Grid: segments, rows, jobs.
__global__ void __launch_bounds__(kThreads)
    sample_weigh_kernel(const __grid_constant__ SampleArgs args) {
  VL_SHARED(BlockScratch, scratch, [1]);
  VL_SHARED(Bins, bins, [1]);
  const Row row(args, static_cast<int>(blockIdx.y));
  const auto job = static_cast<Job>(blockIdx.z);
  if (!row.has_state()) return;
  if (job == kTopIds ? !row.with_logprobs() : row.greedy()) return;
  const SegmentPeak peak = row.peak(scratch[0]);
  if (failed(peak)) return;
  Selection selection;
  if (selection_of(row, job, peak, &selection)) {
    fill_bins(row, job, selection, bins[0], scratch[0]);
  } else {
    draw_segment(row, peak, scratch[0]);
  }
}

// Grid: segments, rows, jobs. The list's order depends on the blocks' order; what is selected from
// it does not.
__global__ void __launch_bounds__(kThreads)
    sample_collect_kernel(const __grid_constant__ SampleArgs args) {
  VL_SHARED(BlockScratch, scratch, [1]);
  VL_SHARED(int32_t, list_begin, [1]);
  const Row row(args, static_cast<int>(blockIdx.y));
  const auto job = static_cast<Job>(blockIdx.z);
  if (!row.has_state()) return;
  if (job == kTopIds ? !row.with_logprobs() : row.greedy()) return;
  const SegmentPeak peak = row.peak(scratch[0]);
  Selection selection;
  if (failed(peak) || !selection_of(row, job, peak, &selection)) return;
  if (!selection.by_weight && selection.count == 0) return;
  const int size = args.params.vocab_size;
  const int64_t target = selection.by_weight
                             ? top_p_target(args.params.top_p[row.state], row.sum(job, scratch[0]))
                             : selection.count;
  const uint64_t* bins = row.bins(job);
  // A target of 0 is reached by the first token.
  const Crossing crossing = find_crossing<kThreads, kSampleBins>(
      scratch[0], target > 0 ? target : 1, [&](int i) { return static_cast<int64_t>(bins[i]); });
  const Segment segment(selection.x, size);
  uint32_t taken = 0;
  segment.for_each([&](int id, float x, int i) {
    const float scaled = (x - selection.max) * selection.scale;
    const bool take =
        id < size && (x > -infinity() || selection.take_all) && bin_of(scaled) <= crossing.bin;
    taken |= static_cast<uint32_t>(take) << i;
  });
  const int count = __popc(taken);
  int64_t place = block_sum_before<kThreads>(count, scratch[0].sums);
  if (threadIdx.x == kThreads - 1) {
    const int32_t total = static_cast<int32_t>(place) + count;
    list_begin[0] = total == 0 ? 0 : atomicAdd(row.num_ids(job), total);
  }
  __syncthreads();
  place += list_begin[0];
  int32_t* ids = row.ids(job);
  for (; taken != 0 && place < kSampleListCapacity; taken &= taken - 1, ++place) {
    const int i = __ffs(static_cast<int>(taken)) - 1;
    ids[place] = vector_begin(i / 4) + i % 4;
  }
}

// ---- choose

// The tokens that a selection is among: a list of ids, or the whole row.
struct Source {
  const float* x;
  const int32_t* ids;  // nullptr: the whole row
  int count;
  bool take_all;

  __device__ Source(const Row& row, Job job, const Selection& selection)
      : x(selection.x), ids(row.ids(job)), count(*row.num_ids(job)), take_all(selection.take_all) {
    if (count <= kSampleListCapacity) return;
    ids = nullptr;
    count = row.params.vocab_size;
  }
  // f(id, x[id]) by one thread for each.
  template <typename F>
  __device__ void for_each(F f) const {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kChooseThreads) {
      const int id = ids != nullptr ? ids[i] : i;
      const float value = x[id];
      if (value > -infinity() || take_all) f(id, value);
    }
  }
};

struct Digits {
  uint32_t counts[kDigits], low[kDigits], high[kDigits];
};

// The last key of the fewest likeliest tokens, of those up to `upper`, that number (or with
// kByWeight: weigh) `target`; a larger one where no key lies between; `upper` if there are too few.
template <bool kByWeight>
__device__ uint64_t select_key(const Source& source, const Selection& selection, uint64_t upper,
                               int64_t target, Digits& digits, BlockScratch& scratch) {
  uint64_t prefix = 0, decided = 0;  // of the key: the bits known so far, and which those are
  int shift = 56;
  while (true) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kChooseThreads) {
      digits.counts[i] = digits.low[i] = digits.high[i] = 0;
    }
    __syncthreads();
    source.for_each([&](int id, float x) {
      const uint64_t key = Key(x, id).bits;
      if (key > upper || (key & decided) != prefix) return;
      const int digit = static_cast<int>(key >> shift & (kDigits - 1));
      atomicAdd(&digits.counts[digit], 1u);
      if constexpr (kByWeight) {
        const int64_t weight = weight_of((x - selection.max) * selection.scale);
        add_halves(&digits.low[digit], &digits.high[digit], weight);
      }
    });
    __syncthreads();
    const Crossing crossing = find_crossing<32, kDigits>(scratch, target, [&](int i) -> int64_t {
      return kByWeight ? join_halves(digits.low[i], digits.high[i]) : digits.counts[i];
    });
    if (!crossing.reached) return upper;
    target -= crossing.before;
    prefix |= static_cast<uint64_t>(crossing.bin) << shift;
    decided |= static_cast<uint64_t>(kDigits - 1) << shift;
    const uint32_t count = digits.counts[crossing.bin];
    if (shift == 0 || count == 1 || (!kByWeight && count == target)) break;
    shift = shift == 32 ? 16 : shift - 8;  // the upper 8 bits of an id are 0
  }
  const uint64_t last = prefix | ((1ull << shift) - 1);
  return last < upper ? last : upper;
}

// The choice of a row with top_k or top_p, for every thread.
__device__ int32_t choose_among_survivors(const Row& row, const SegmentPeak& peak,
                                          Selection selection, Digits& digits,
                                          BlockScratch& scratch) {
  const Source source(row, kDraw, selection);
  uint64_t last = kNoKey;
  if (row.cut_k()) {
    last = select_key<false>(source, selection, kNoKey, selection.count, digits, scratch);
  }
  selection.scale = row.scale();
  if (row.cut_p()) {
    int64_t total = 0;
    if (row.cut_k()) {
      source.for_each([&](int id, float x) {
        if (Key(x, id).bits > last) return;
        total += weight_of((x - selection.max) * selection.scale);
      });
      total = block_reduce<kChooseThreads>(total, scratch.sums, Add());
    } else {
      total = row.sum(kDraw, scratch);
    }
    const int64_t target = top_p_target(row.params.top_p[row.state], total);
    last = select_key<true>(source, selection, last, target > 0 ? target : 1, digits, scratch);
  }
  __syncthreads();
  if (threadIdx.x == 0) scratch.draws[0] = peak_draw(row, peak.processed);
  __syncthreads();
  SegmentDraw best = scratch.draws[0];
  const float min_scaled = row.min_scaled();
  const uint64_t seed = row.seed();
  const uint32_t position = row.position();
  source.for_each([&](int id, float x) {
    const float scaled = (x - selection.max) * selection.scale;
    if (Key(x, id).bits > last || scaled < min_scaled || scaled + kMaxGumbel < best.score) return;
    const uint32_t bits = philox_word(seed, position, id);
    if (~bits >= winning_limit(scaled - best.score)) return;
    best = BetterDraw()(best, {scaled + gumbel(bits), id});
  });
  return static_cast<int32_t>(block_reduce<kChooseThreads>(best, scratch.draws, BetterDraw()).id);
}

__device__ int32_t choose_token(const Row& row, const SegmentPeak& peak, Digits& digits,
                                BlockScratch& scratch) {
  if (row.greedy()) return Key(peak.processed).id();
  Selection selection;
  if (selection_of(row, kDraw, peak, &selection)) {
    return choose_among_survivors(row, peak, selection, digits, scratch);
  }
  const SegmentDraw none = {-static_cast<double>(infinity()), 0};
  const SegmentDraw* draws = row.work.draws + row.first_segment();
  const SegmentDraw best =
      block_reduce_array(draws, row.work.num_segments, none, scratch.draws, BetterDraw());
  return static_cast<int32_t>(best.id);
}

struct TopKeys {
  uint64_t keys[kMaxTopIds];
  uint32_t count;
};

__device__ void write_top_ids(const Row& row, const SegmentPeak& peak, Digits& digits, TopKeys& top,
                              BlockScratch& scratch) {
  Selection selection;
  if (!selection_of(row, kTopIds, peak, &selection) || selection.count == 0) return;
  const double log_total = log_of_weight(row.sum(kTopIds, scratch));
  const Source source(row, kTopIds, selection);
  const uint64_t last =
      select_key<false>(source, selection, kNoKey, selection.count, digits, scratch);
  if (threadIdx.x == 0) top.count = 0;
  __syncthreads();
  source.for_each([&](int id, float x) {
    const uint64_t key = Key(x, id).bits;
    if (key <= last) top.keys[atomicAdd(&top.count, 1u)] = key;
  });
  __syncthreads();
  const int count = static_cast<int>(selection.count);
  const int64_t begin = static_cast<int64_t>(row.index) * row.params.max_logprobs;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kChooseThreads) {
    int place = 0;
    for (int j = 0; j < count; ++j) place += top.keys[j] < top.keys[i];
    const Key key(top.keys[i]);
    row.params.top_ids[begin + place] = key.id();
    row.params.top_logprobs[begin + place] =
        logprob_of(selection.x[key.id()], selection.max, log_total);
  }
}

// Grid: rows, jobs.
__global__ void __launch_bounds__(kChooseThreads, 1)
    sample_choose_kernel(const __grid_constant__ SampleArgs args) {
  VL_SHARED(BlockScratch, scratch, [1]);
  VL_SHARED(Digits, digits, [1]);
  VL_SHARED(TopKeys, top, [1]);
  const SampleParams& params = args.params;
  const Row row(args, static_cast<int>(blockIdx.x));
  SegmentPeak peak = {kNoKey, kNoKey};
  if (row.has_state()) peak = row.peak(scratch[0]);
  if (blockIdx.y == kTopIds) {
    if (params.top_ids == nullptr) return;
    const int64_t begin = static_cast<int64_t>(row.index) * params.max_logprobs;
    const int count = failed(peak) ? 0 : max(row.num_top_ids(), 0);
    for (int i = count + static_cast<int>(threadIdx.x); i < params.max_logprobs;
         i += kChooseThreads) {
      params.top_ids[begin + i] = -1;
      params.top_logprobs[begin + i] = -infinity();
    }
    if (count > 0) write_top_ids(row, peak, digits[0], top[0], scratch[0]);
    return;
  }
  const int32_t token = failed(peak) ? -1 : choose_token(row, peak, digits[0], scratch[0]);
  const bool with_logprob = token >= 0 && params.logprobs != nullptr && row.with_logprobs();
  float logprob = -infinity();
  if (with_logprob) {
    const double log_total = log_of_weight(row.sum(kTopIds, scratch[0]));
    logprob = logprob_of(row.raw()[token], Key(peak.raw).logit(), log_total);
  }
  if (threadIdx.x > 0) return;
  params.token_ids[row.index] = token;
  if (params.logprobs != nullptr) params.logprobs[row.index] = logprob;
  if (params.ranks != nullptr) params.ranks[row.index] = with_logprob ? 1 : 0;
  if (token >= 0 && params.output_counts != nullptr) {
    ++params.output_counts[row.state_offset() + token];
  }
}

// ---- rank

// Grid: segments, rows.
__global__ void __launch_bounds__(kThreads)
    sample_rank_kernel(const __grid_constant__ SampleArgs args) {
  VL_SHARED(BlockScratch, scratch, [1]);
  const Row row(args, static_cast<int>(blockIdx.y));
  const int32_t token = args.params.token_ids[row.index];
  if (token < 0 || !row.with_logprobs()) return;
  const float chosen = row.raw()[token];
  const Segment segment(row.raw(), args.params.vocab_size);
  int64_t above = 0;
  segment.for_each([&](int, float x, int) { above += x > chosen; });
  above = block_reduce<kThreads>(above, scratch[0].sums, Add());
  if (threadIdx.x == 0 && above > 0) {
    atomicAdd(args.params.ranks + row.index, static_cast<int32_t>(above));
  }
}

}  // namespace

void sample_cuda(const SampleParams& params) {
  if (params.num_rows == 0) return;
  VL_CHECK(params.vocab_size <= kMaxVocabSize, "sample: vocab_size must be at most 2^24 on CUDA");
  VL_CHECK(params.max_logprobs <= kMaxTopIds, "sample: max_logprobs must be at most 1024 on CUDA");
  const SampleArgs args{params,
                        SampleWorkspace(params.workspace, params.num_rows, params.vocab_size)};
  VL_CHECK(params.workspace != nullptr && params.workspace_bytes >= args.work.num_bytes,
           "sample: CUDA needs a workspace of sample_workspace_bytes(num_rows, vocab_size)");
  const auto segments = static_cast<unsigned>(args.work.num_segments);
  const auto rows = static_cast<unsigned>(params.num_rows);
  const unsigned jobs = params.logprobs != nullptr || params.top_ids != nullptr ? 2 : 1;
  const dim3 per_row(segments, rows), per_job(segments, rows, jobs);
  VL_LAUNCH(sample_prepare_kernel, per_row, kThreads, 0, params.stream, args);
  VL_LAUNCH(sample_weigh_kernel, per_job, kThreads, 0, params.stream, args);
  VL_LAUNCH(sample_collect_kernel, per_job, kThreads, 0, params.stream, args);
  VL_LAUNCH(sample_choose_kernel, dim3(rows, jobs), kChooseThreads, 0, params.stream, args);
  if (params.ranks != nullptr) {
    VL_LAUNCH(sample_rank_kernel, per_row, kThreads, 0, params.stream, args);
  }
}

}  // namespace vllm_lite
