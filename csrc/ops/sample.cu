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
#include "ops/sample_choose.cuh"
#include "ops/sample_row.cuh"
#include "ops/sample_select.cuh"

namespace vllm_lite {
namespace sampling {

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
  __device__ void change(const int32_t* ids, int count, bool masked) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
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
  // Sets the bits of ids that are not in a row's token mask.
  __device__ void exclude(const uint32_t* allowed, int vocab_size) {
    const int first = segment_begin() / 32, count = (vocab_size + 31) / 32 - first;
    for (int i = static_cast<int>(threadIdx.x); i < kSampleSegment / 32 && i < count;
         i += kThreads) {
      bits[i] |= ~allowed[first + i];
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
  const IdLists lists = row.lists();
  const int count = row.kept().num_bias;
  for (int i = 0; i < count; ++i) {
    const int id = lists.bias_ids[i];
    const int64_t place = static_cast<int64_t>(id) - segment_begin();
    if (place < 0 || place >= kSampleSegment || id >= row.params.vocab_size) continue;
    if (place / 4 % kThreads == threadIdx.x) row.copy()[id] += lists.bias_values[i];
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
  const uint32_t* token_mask = row.token_mask();
  const bool with_mask = restricted || token_mask != nullptr || without_stop;
  if (with_mask) mask.fill(restricted ? ~0u : 0u);
  if (restricted) {
    mask.change(row.lists().allowed_ids, row.kept().num_allowed, false);
  }
  if (token_mask != nullptr) mask.exclude(token_mask, size);
  if (without_stop) {
    mask.change(row.lists().stop_ids, row.kept().num_stop, true);
  }
  const bool with_penalties = row.with_penalties();
  const float repetition = row.sampling().repetition_penalty;
  const float frequency = row.sampling().frequency_penalty;
  const float presence = row.sampling().presence_penalty;
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
                             ? top_p_target(row.sampling().top_p, row.sum(job, scratch[0]))
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

}  // namespace sampling

void sample_cuda(const SampleParams& params) {
  using namespace sampling;
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