// The sampler's last word on a row: the exact cut among the survivors that the segments listed, the
// draw, and the results. See sample.cu.
#pragma once

#include "ops/sample_select.cuh"

namespace vllm_lite::sampling {

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
    const int64_t target = top_p_target(row.sampling().top_p, total);
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
  const int32_t token =
      failed(peak) ? failure(peak) : choose_token(row, peak, digits[0], scratch[0]);
  const bool with_logprob = token >= 0 && params.logprobs != nullptr && row.with_logprobs();
  float logprob = -infinity();
  if (with_logprob) {
    const double log_total = log_of_weight(row.sum(kTopIds, scratch[0]));
    logprob = logprob_of(row.raw()[token], Key(peak.raw).logit(), log_total);
  }
  if (threadIdx.x > 0) return;
  params.token_ids[row.index] = token;
  if (params.last_tokens != nullptr && row.state >= 0 && row.state < params.max_rows) {
    params.last_tokens[row.state] = max(token, 0);
  }
  if (params.logprobs != nullptr) params.logprobs[row.index] = logprob;
  if (params.ranks != nullptr) params.ranks[row.index] = with_logprob ? 1 : 0;
  if (token >= 0 && params.output_counts != nullptr) {
    ++params.output_counts[row.state_offset() + token];
  }
}

}  // namespace vllm_lite::sampling
