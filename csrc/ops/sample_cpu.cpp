// Sampling without a sort. Rows are independent and run in parallel; within a row every cut (top_k,
// top_p) is found by selection over a buffer of likely candidates, in the total order (logit
// descending, id ascending), and the survivors are named by the last of them. The vector passes are
// in sample_isa.cpp.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "core/parallel_for.h"
#include "ops/ops.h"
#include "ops/sample_math.h"
#include "ops/sample_passes.h"

namespace vllm_lite {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Weighted {
  Key key;
  int64_t weight;
  friend bool operator<(const Weighted& a, const Weighted& b) { return a.key < b.key; }
};

// Buffers of one thread; they grow to the vocabulary once.
struct Scratch {
  std::vector<float> logits;
  std::vector<float> values;
  std::vector<int32_t> ids;
  std::vector<int64_t> weights;
  std::vector<Key> keys;
  std::vector<Weighted> weighted;
};

const SamplePasses& current_passes() {
  switch (current_isa()) {
    case Isa::kAvx512:
    case Isa::kAvx512Bf16:
    case Isa::kAmx:
      return avx512::kSamplePasses;
    case Isa::kAvx2:
      return avx2::kSamplePasses;
    case Isa::kPortable:
      break;
  }
  return portable::kSamplePasses;
}

class RowSampler {
 public:
  RowSampler(const SampleParams& params, int32_t index, Scratch& scratch)
      : params_(params),
        index_(index),
        row_(params.rows[index]),
        size_(params.vocab_size),
        raw_(params.logits + index * params.logits_stride),
        passes_(current_passes()),
        scratch_(scratch) {}

  void run() {
    write_failure();
    if (row_ < 0 || row_ >= params_.max_rows) return;
    choose();
    if (params_.last_tokens) {
      params_.last_tokens[row_] = std::max(params_.token_ids[index_], 0);
    }
  }

 private:
  void choose() {
    const Peak raw_peak = passes_.find_peak(raw_, size_);
    if (raw_peak.broken || raw_peak.id < 0) return;
    const float* x = processed_logits();
    const Peak peak = x == raw_ ? raw_peak : passes_.find_peak(x, size_);
    if (!peak.broken && peak.id < 0) params_.token_ids[index_] = kAllMaskedToken;
    if (peak.broken || peak.id < 0) return;
    const int32_t token = sampling().temperature > 0.0f ? draw(x, peak) : peak.id;
    params_.token_ids[index_] = token;
    if (params_.output_counts) ++params_.output_counts[state_offset() + token];
    if (sampling().num_logprobs >= 0) write_logprobs(token, raw_peak.value);
  }

  int64_t state_offset() const { return static_cast<int64_t>(row_) * size_; }
  bool in_vocabulary(int32_t id) const { return id >= 0 && id < size_; }

  void write_failure() {
    params_.token_ids[index_] = kFailedToken;
    if (params_.logprobs) params_.logprobs[index_] = -kInfinity;
    if (params_.ranks) params_.ranks[index_] = 0;
    if (!params_.top_ids) return;
    const int64_t begin = static_cast<int64_t>(index_) * params_.max_logprobs;
    std::fill_n(params_.top_ids + begin, params_.max_logprobs, -1);
    std::fill_n(params_.top_logprobs + begin, params_.max_logprobs, -kInfinity);
  }

  const RowState& kept() const { return params_.row_state[row_]; }
  const RowSampling& sampling() const { return kept().sampling; }

  // Bias, masks and penalties on a copy; the raw row itself if there are none.
  const float* processed_logits() {
    const bool with_lists = params_.id_lists != nullptr;
    const bool biased = with_lists && kept().num_bias > 0;
    const bool restricted = with_lists && kept().num_allowed > 0;
    const bool no_stop = with_lists && kept().num_stop > 0 &&
                         params_.positions[index_] < sampling().min_total_tokens;
    const float repetition = sampling().repetition_penalty;
    const float presence = sampling().presence_penalty;
    const float frequency = sampling().frequency_penalty;
    const bool penalized =
        params_.output_counts && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
    const uint32_t* mask =
        token_mask_of(params_.token_masks, params_.mask_index, params_.num_masks, index_, size_);
    if (!biased && !restricted && !mask && !no_stop && !penalized) return raw_;
    scratch_.logits.assign(raw_, raw_ + size_);
    float* x = scratch_.logits.data();
    if (with_lists) {
      const IdLists lists(params_.id_lists + row_ * params_.id_lists_stride, kept());
      for (int32_t i = 0; i < kept().num_bias; ++i) {
        if (in_vocabulary(lists.bias_ids[i])) x[lists.bias_ids[i]] += lists.bias_values[i];
      }
      if (restricted) restrict_to({lists.allowed_ids, static_cast<size_t>(kept().num_allowed)}, x);
      for (int32_t i = 0; no_stop && i < kept().num_stop; ++i) {
        if (in_vocabulary(lists.stop_ids[i])) x[lists.stop_ids[i]] = -kInfinity;
      }
    }
    if (mask) apply_mask(mask, x);
    if (penalized) {
      passes_.penalize(x, size_, params_.output_counts + state_offset(),
                       params_.prompt_mask + state_offset(), repetition, frequency, presence);
    }
    return x;
  }

  void restrict_to(std::span<const int32_t> ids, float* x) {
    scratch_.values.clear();
    for (const int32_t id : ids) scratch_.values.push_back(in_vocabulary(id) ? x[id] : 0.0f);
    std::fill_n(x, size_, -kInfinity);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (in_vocabulary(ids[i])) x[ids[i]] = scratch_.values[i];
    }
  }

  void apply_mask(const uint32_t* mask, float* x) {
    for (int32_t begin = 0; begin < size_; begin += 32) {
      const uint32_t word = mask[begin / 32];
      const int32_t end = std::min(begin + 32, size_);
      if (word == 0) std::fill(x + begin, x + end, -kInfinity);
      if (word == 0 || word == ~0u) continue;
      for (int32_t id = begin; id < end; ++id) {
        if ((word >> (id - begin) & 1) == 0) x[id] = -kInfinity;
      }
    }
  }

  int32_t draw(const float* x, const Peak& peak) {
    DrawParams draw{};
    draw.x = x;
    draw.size = size_;
    draw.peak = peak;
    draw.scale = temperature_scale(sampling().temperature);
    draw.cut_value = -kInfinity;
    draw.cut_id = -1;
    draw.min_scaled = -kInfinity;
    draw.seed = seed_of(sampling());
    draw.position = static_cast<uint32_t>(params_.positions[index_]);
    const float min_p = sampling().min_p;
    if (min_p > 0.0f) draw.min_scaled = least_scaled(min_p);

    const int32_t top_k = sampling().top_k;
    const float top_p = sampling().top_p;
    const bool cut_k = top_k > 0 && top_k < size_, cut_p = top_p < 1.0f;
    if (cut_k || cut_p) {
      const Key last =
          cut_p ? last_of_top_p(draw, cut_k ? top_k : 0, top_p) : last_of_top_k(x, top_k);
      draw.cut_value = last.logit();
      draw.cut_id = last.id();
    }
    return passes_.draw(draw);
  }

  // Fills scratch_.keys with the k largest logits above -inf, in no order.
  void collect_top_k(const float* x, int64_t k) {
    std::vector<Key>& keys = scratch_.keys;
    keys.clear();
    const int64_t capacity = std::max<int64_t>(k, 1024) + kCollectRoom;
    scratch_.ids.resize(capacity);
    // Ids come in ascending order, so that a later logit equal to the k-th so far is not among the
    // k largest; the threshold rises and soon lets hardly anything through.
    float threshold = -kInfinity;
    for (int64_t position = 0; position < size_;) {
      int64_t count = 0;
      position = passes_.collect_above(x, position, size_, threshold, scratch_.ids.data(), capacity,
                                       &count);
      for (int64_t i = 0; i < count; ++i) keys.emplace_back(x[scratch_.ids[i]], scratch_.ids[i]);
      if (static_cast<int64_t>(keys.size()) <= k) continue;
      std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end());
      keys.erase(keys.begin() + k, keys.end());
      threshold = keys.back().logit();
    }
  }

  Key last_of_top_k(const float* x, int32_t k) {
    collect_top_k(x, k);
    return *std::max_element(scratch_.keys.begin(), scratch_.keys.end());
  }

  // The last key of the smallest set of likeliest tokens that holds `p` of the weight of the k
  // likeliest (of all if k is 0).
  Key last_of_top_p(const DrawParams& draw, int32_t k, float p) {
    int64_t total = 0, target = 0;
    if (k > 0) {
      collect_top_k(draw.x, k);
      total = weigh_keys(draw);
      target = top_p_target(p, total);
    } else {
      total = passes_.sum_weights(draw.x, size_, draw.peak.value, draw.scale);
      target = top_p_target(p, total);
      collect_nucleus(draw, total - target);
      weigh_keys(draw);
    }
    return crossing_key(narrow(draw.peak.value, target));
  }

  // Fills scratch_.keys with a set of the likeliest tokens whose complement weighs at most `spare`:
  // those left out have a weight of at most spare / size each.
  void collect_nucleus(const DrawParams& draw, int64_t spare) {
    const double most = std::max<double>(1.0, static_cast<double>(spare / size_));
    // What is below the threshold is so by 1 % at least; the last term is for the rounding of x.
    const double scaled = std::log(std::ldexp(most, -kWeightBits)) - 0.01;
    const double margin = std::abs(double{draw.peak.value}) * 0x1p-22;
    const auto threshold =
        static_cast<float>(draw.peak.value + scaled / double{draw.scale} - margin);
    scratch_.ids.resize(size_ + kCollectRoom);
    int64_t count = 0;
    passes_.collect_above(draw.x, 0, size_, threshold, scratch_.ids.data(), size_ + kCollectRoom,
                          &count);
    scratch_.keys.clear();
    for (int64_t i = 0; i < count; ++i) {
      scratch_.keys.emplace_back(draw.x[scratch_.ids[i]], scratch_.ids[i]);
    }
  }

  // Fills scratch_.values and scratch_.weights from scratch_.keys; returns the sum of the weights.
  int64_t weigh_keys(const DrawParams& draw) {
    const auto count = static_cast<int64_t>(scratch_.keys.size());
    scratch_.values.resize(count);
    scratch_.weights.resize(count);
    for (int64_t i = 0; i < count; ++i) scratch_.values[i] = scratch_.keys[i].logit();
    passes_.weights(scratch_.values.data(), count, draw.peak.value, draw.scale,
                    scratch_.weights.data());
    return std::accumulate(scratch_.weights.begin(), scratch_.weights.end(), int64_t{0});
  }

  // Sorts the keys into buckets by logit and leaves in scratch_.weighted those of the bucket in
  // which the sum of weights, likeliest first, reaches `target`. Returns what is then left of the
  // target.
  int64_t narrow(float max, int64_t target) {
    constexpr int kBuckets = 256;
    const std::vector<float>& values = scratch_.values;
    const float least = *std::min_element(values.begin(), values.end());
    const float span = std::clamp(max - least, FLT_MIN, FLT_MAX);
    const float factor = std::min((kBuckets - 1) / span, FLT_MAX);
    // Never falls as the logit falls, so that buckets are in the order of the keys.
    const auto bucket_of = [&](float value) {
      return std::min(kBuckets - 1, static_cast<int>(std::min(max - value, FLT_MAX) * factor));
    };
    int64_t masses[kBuckets] = {};
    for (size_t i = 0; i < values.size(); ++i) masses[bucket_of(values[i])] += scratch_.weights[i];
    int bucket = 0;
    while (bucket < kBuckets - 1 && masses[bucket] < target) target -= masses[bucket++];
    scratch_.weighted.clear();
    for (size_t i = 0; i < values.size(); ++i) {
      if (bucket_of(values[i]) != bucket) continue;
      scratch_.weighted.push_back({scratch_.keys[i], scratch_.weights[i]});
    }
    return target;
  }

  // The first key, in order, up to which scratch_.weighted sums to `target` or more. Halves the
  // range that holds it: linear in its length.
  Key crossing_key(int64_t target) {
    auto begin = scratch_.weighted.begin(), end = scratch_.weighted.end();
    while (end - begin > 1) {
      const auto middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end);
      int64_t below = 0;
      for (auto i = begin; i != middle; ++i) below += i->weight;
      if (below >= target) {
        end = middle;
      } else {
        target -= below;
        begin = middle;
      }
    }
    return begin->key;
  }

  void write_logprobs(int32_t token, float max) {
    const int64_t total = passes_.sum_weights(raw_, size_, max, 1.0f);
    const double log_total = log_of_weight(total);
    const auto logprob = [&](int32_t id) { return logprob_of(raw_[id], max, log_total); };
    if (params_.logprobs) params_.logprobs[index_] = logprob(token);
    if (params_.ranks) {
      const int64_t above = passes_.count_above(raw_, size_, raw_[token]);
      params_.ranks[index_] = static_cast<int32_t>(1 + above);
    }
    if (!params_.top_ids) return;
    const int64_t wanted = std::min(sampling().num_logprobs, params_.max_logprobs);
    const int64_t count = std::min<int64_t>(wanted, size_);
    if (count == 0) return;
    collect_top_k(raw_, count);
    std::vector<Key>& keys = scratch_.keys;
    std::sort(keys.begin(), keys.end());
    // Fewer finite logits than asked for: the rest is -inf.
    for (int32_t id = 0; static_cast<int64_t>(keys.size()) < count; ++id) {
      if (raw_[id] == -kInfinity) keys.emplace_back(raw_[id], id);
    }
    const int64_t begin = static_cast<int64_t>(index_) * params_.max_logprobs;
    for (int64_t i = 0; i < count; ++i) {
      params_.top_ids[begin + i] = keys[i].id();
      params_.top_logprobs[begin + i] = logprob(keys[i].id());
    }
  }

  const SampleParams& params_;
  const int32_t index_;
  const int32_t row_;
  const int32_t size_;
  const float* raw_;
  const SamplePasses& passes_;
  Scratch& scratch_;
};

}  // namespace

void sample_cpu(const SampleParams& params) {
  parallel_for(params.num_rows, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      RowSampler(params, static_cast<int32_t>(i), scratch).run();
    }
  });
}

}  // namespace vllm_lite
