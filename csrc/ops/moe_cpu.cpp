// Beside the experts' matrix products these are small: plain loops, no vectors by hand.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/element.h"
#include "core/parallel_for.h"
#include "ops/moe.h"

namespace vllm_lite {
namespace {

using namespace element;

constexpr int64_t kElementsPerTask = 16384;

template <typename T>
void route(const RouteExpertsParams& p) {
  const int64_t grain = kElementsPerTask / p.num_experts + 1;
  parallel_for(p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> logits(static_cast<size_t>(p.num_experts));
    std::vector<int32_t> order(logits.size());
    for (int64_t token = begin; token < end; ++token) {
      const T* row = static_cast<const T*>(p.logits) + token * p.logits_stride;
      for (int32_t e = 0; e < p.num_experts; ++e) {
        logits[static_cast<size_t>(e)] = to_float(row[e]);
        order[static_cast<size_t>(e)] = e;
      }
      const auto logit = [&](int32_t e) { return logits[static_cast<size_t>(e)]; };
      std::partial_sort(order.begin(), order.begin() + p.k, order.end(), [&](int32_t a, int32_t b) {
        if (std::isnan(logit(a)) || std::isnan(logit(b))) {
          return std::isnan(logit(a)) == std::isnan(logit(b)) ? a < b : std::isnan(logit(b));
        }
        return logit(a) != logit(b) ? logit(a) > logit(b) : a < b;
      });
      const float largest = logit(order[0]);
      const size_t summed = static_cast<size_t>(p.renormalize ? p.k : p.num_experts);
      double sum = 0.0;
      for (size_t i = 0; i < summed; ++i) {
        sum += std::exp(logit(p.renormalize ? order[i] : static_cast<int32_t>(i)) - largest);
      }
      for (int32_t choice = 0; choice < p.k; ++choice) {
        const int32_t e = order[static_cast<size_t>(choice)];
        p.ids[token * p.k + choice] = e;
        p.weights[token * p.k + choice] = std::exp(logit(e) - largest) / static_cast<float>(sum);
      }
    }
  });
}

template <typename T>
void combine(const CombineExpertsParams& p) {
  const int64_t grain = kElementsPerTask / (int64_t{p.size} * p.k + 1) + 1;
  parallel_for(p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(static_cast<size_t>(p.size));
    for (int64_t token = begin; token < end; ++token) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t pair = token * p.k; pair < (token + 1) * p.k; ++pair) {
        if (p.rows[pair] < 0) continue;
        const T* row = static_cast<const T*>(p.expert_rows) + p.rows[pair] * p.expert_rows_stride;
        for (size_t i = 0; i < sums.size(); ++i) sums[i] += p.weights[pair] * to_float(row[i]);
      }
      T* out = static_cast<T*>(p.out) + token * p.out_stride;
      for (size_t i = 0; i < sums.size(); ++i) from_float(sums[i], out[i]);
    }
  });
}

}  // namespace

void route_experts_cpu(const RouteExpertsParams& params) {
  dispatch_dtype(params.dtype, [&](auto zero) { route<decltype(zero)>(params); });
}

void permute_tokens_cpu(const PermuteTokensParams& p) {
  const auto is_here = [&](int32_t id) { return id >= 0 && id < p.num_experts; };
  std::fill(p.expert_start, p.expert_start + p.num_experts + 1, 0);
  for (int32_t pair = 0; pair < p.num_pairs; ++pair) {
    if (is_here(p.ids[pair])) ++p.expert_start[p.ids[pair] + 1];
  }
  for (int32_t e = 0; e < p.num_experts; ++e) p.expert_start[e + 1] += p.expert_start[e];
  std::vector<int32_t> next(p.expert_start, p.expert_start + p.num_experts + 1);
  for (int32_t pair = 0; pair < p.num_pairs; ++pair) {
    const bool here = is_here(p.ids[pair]);
    const int32_t row = next[static_cast<size_t>(here ? p.ids[pair] : p.num_experts)]++;
    p.order[row] = pair;
    p.rows[pair] = here ? row : -1;
  }
}

void gather_rows_cpu(const GatherRowsParams& p) {
  for (int32_t row = 0; row < p.num_rows; ++row) {
    VL_CHECK(p.order[row] >= 0 && p.order[row] / p.k < p.num_tokens,
             "gather_rows: order[" + std::to_string(row) + "] is " + std::to_string(p.order[row]) +
                 "; input has " + std::to_string(p.num_tokens) + " rows, each for " +
                 std::to_string(p.k) + " pairs");
  }
  parallel_for(
      p.num_rows, kElementsPerTask / (p.row_bytes + 1) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          std::memcpy(static_cast<char*>(p.out) + row * p.out_stride,
                      static_cast<const char*>(p.input) + p.order[row] / p.k * p.input_stride,
                      static_cast<size_t>(p.row_bytes));
        }
      });
}

void combine_experts_cpu(const CombineExpertsParams& params) {
  for (int64_t pair = 0; pair < int64_t{params.num_tokens} * params.k; ++pair) {
    VL_CHECK(params.rows[pair] < params.num_rows,
             "combine_experts: rows names row " + std::to_string(params.rows[pair]) +
                 "; expert_rows has rows 0 to " + std::to_string(params.num_rows - 1));
  }
  dispatch_dtype(params.dtype, [&](auto zero) { combine<decltype(zero)>(params); });
}

}  // namespace vllm_lite
