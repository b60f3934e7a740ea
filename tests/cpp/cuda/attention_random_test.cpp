// Random mixes of decodes, chunks and prompts, of every type and kind of score, against sums in
// double.
#include <cuda_on_host/options.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../core/numbers.h"
#include "attention/attention_plan.h"
#include "attention/params.h"

namespace vllm_lite {
namespace {

// What has kernels of its own.
struct Kernels {
  int32_t head_size;
  DType dtype;
  KvDType kv_dtype;
};

std::vector<Kernels> kernels() {
#ifdef VL_PART_ALONE  // those of attention_part.cu
  return {{64, DType::kBFloat16, KvDType::kAsQuery}, {64, DType::kFloat16, KvDType::kFloat8E4M3}};
#else
  std::vector<Kernels> all;
  for (const int32_t head_size : {64, 80, 96, 128, 256}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const KvDType kv_dtype : {KvDType::kAsQuery, KvDType::kFloat8E4M3}) {
        all.push_back({head_size, dtype, kv_dtype});
      }
    }
  }
  return all;
#endif
}

// What scores may have beside a key and a query. Every other case has none of it, and with that
// kernels of its own.
struct Extras {
  bool window = false, soft_cap = false, alibi = false;
};
constexpr Extras kCases[] = {{}, {.window = true},
                             {}, {.window = true, .soft_cap = true},
                             {}, {.window = true, .alibi = true},
                             {}, {.soft_cap = true, .alibi = true}};
constexpr uint8_t kNaNByte = 0xff;  // a NaN in each of the types

struct Step {
  Kernels kernels;
  int32_t head_size, num_kv_heads, group, block_size, window, num_multiprocessors;
  float soft_cap = 0, k_scale = 1, v_scale = 1;
  std::vector<int32_t> query_start{0}, seq_lens, rows;
  int32_t num_blocks = 0, table_stride = 0;
  int32_t broken = -1;  // a sequence whose last block does not exist
  std::vector<int32_t> tables;
  std::vector<uint16_t> query, out;
  std::vector<uint8_t> cache;
  std::vector<float> alibi_slopes;

  Step(Random& random, const Kernels& chosen, const Extras& extras)
      : kernels(chosen), head_size(chosen.head_size) {
    num_kv_heads = random.integer(1, 2);
    group = random.integer(1, 5);
    block_size = 16 << random.integer(0, 4);
    window = extras.window ? random.integer(1, 300) : 0;
    num_multiprocessors = random.integer(1, 8);
    // A decode and a prompt at least.
    const int32_t num_seqs = random.integer(2, 4);
    for (int32_t s = 0; s < num_seqs; ++s) {
      const bool is_decode = s < 2 ? s == 0 : random.integer(0, 1) == 0;
      const int32_t num_query = is_decode ? 1 : random.integer(2, 60);
      query_start.push_back(query_start.back() + num_query);
      // Long enough for several ranges of KV, and so for a merge.
      seq_lens.push_back(num_query + random.integer(0, is_decode ? 600 : 100));
      table_stride = std::max(table_stride, (seq_lens.back() + block_size - 1) / block_size);
      rows.push_back(num_seqs - 1 - s);
    }
    // Small enough to bend many of the scores.
    if (extras.soft_cap) soft_cap = 0.25f * float(random.integer(1, 12));
    for (int32_t head = 0; extras.alibi && head < num_heads(); ++head) {
      alibi_slopes.push_back(std::exp2(-float(random.integer(1, 8))));
    }
    if (is_fp8()) {
      k_scale = 0.25f * float(random.integer(1, 8));
      v_scale = 0.25f * float(random.integer(1, 8));
    }
    num_blocks = num_seqs * table_stride + 1;
    for (int32_t b = 0; b + 1 < num_blocks; ++b) tables.push_back(b);
    std::shuffle(tables.begin(), tables.end(), random.engine());
    query.resize(size_t(query_start.back()) * num_heads() * head_size);
    for (uint16_t& x : query) x = narrow_to_type(random.normal());
    out.assign(query.size(), kNaNByte << 8 | kNaNByte);
    // What lies past a sequence's end may hold anything.
    cache.assign(size_t(num_blocks) * 2 * num_kv_heads * block_size * row_bytes(), kNaNByte);
    for (int32_t s = 0; s < num_seqs; ++s) {
      for (int32_t token = 0; token < seq_lens[s]; ++token) {
        for (int32_t head = 0; head < 2 * num_kv_heads; ++head) {
          fill_row(random, kv_row(s, token, head));
        }
      }
    }
    if (num_seqs > 2 && random.integer(0, 1) == 0) {
      broken = num_seqs - 1;
      tables[rows[broken] * table_stride + (seq_lens[broken] - 1) / block_size] = num_blocks;
    }
  }

  int32_t num_heads() const { return num_kv_heads * group; }

  bool is_fp8() const { return kernels.kv_dtype == KvDType::kFloat8E4M3; }
  int64_t row_bytes() const { return head_size * (is_fp8() ? 1 : 2); }

  // Of and to the query's type.
  float widen_type(uint16_t bits) const {
    return kernels.dtype == DType::kBFloat16 ? widen(bits) : widen_half(bits);
  }
  uint16_t narrow_to_type(float x) const {
    return kernels.dtype == DType::kBFloat16 ? narrow(x) : narrow_half(x);
  }

  void fill_row(Random& random, uint8_t* row) const {
    for (int32_t i = 0; i < head_size; ++i) {
      if (is_fp8()) {  // all that is below 4, of either sign
        row[i] = uint8_t(random.integer(0, 8 * 9 - 1) | random.integer(0, 1) << 7);
      } else {
        const uint16_t bits = narrow_to_type(random.normal());
        std::memcpy(row + 2 * i, &bits, sizeof(bits));
      }
    }
  }
  double kv_element(const uint8_t* row, int32_t i) const {
    if (is_fp8()) return widen_fp8(row[i]);
    uint16_t bits;
    std::memcpy(&bits, row + 2 * i, sizeof(bits));
    return widen_type(bits);
  }

  // head: of the keys, or num_kv_heads further on of the values.
  uint8_t* kv_row(int32_t s, int32_t token, int32_t head) {
    const int64_t block = tables[rows[s] * table_stride + token / block_size];
    const int64_t row = (block * 2 * num_kv_heads + head) * block_size + token % block_size;
    return cache.data() + row * row_bytes();
  }

  void run() {
    PlanInput input{query_start.data(), seq_lens.data(), int32_t(seq_lens.size()), num_heads(),
                    num_kv_heads,       window,          num_multiprocessors};
    const int64_t size = attention_plan_size(query_start.back(), input.num_seqs, num_heads(),
                                             num_kv_heads, num_multiprocessors);
    // Exactly as many words as the plan has.
    std::vector<int32_t> words(size);
    words.resize(plan_attention(input, words.data(), size));
    const std::vector<int32_t> plan(words);
    std::vector<float> workspace(attention_workspace_size(num_kv_heads, head_size), NAN);
    PagedAttentionParams params{};
    params.out = out.data();
    params.query = query.data();
    params.kv_cache = cache.data();
    params.block_tables = tables.data();
    params.rows = rows.data();
    params.query_start = query_start.data();
    params.seq_lens = seq_lens.data();
    params.out_token_stride = params.query_token_stride = num_heads() * head_size;
    params.block_table_stride = table_stride;
    params.num_blocks = num_blocks;
    params.num_tokens = query_start.back();
    params.max_rows = params.num_seqs = input.num_seqs;
    params.num_heads = num_heads();
    params.num_kv_heads = num_kv_heads;
    params.head_size = head_size;
    params.block_size = block_size;
    params.scale = 1 / std::sqrt(float(head_size));
    params.sliding_window = window;
    params.soft_cap = soft_cap;
    params.alibi_slopes = alibi_slopes.empty() ? nullptr : alibi_slopes.data();
    params.dtype = kernels.dtype;
    params.kv_dtype = kernels.kv_dtype;
    params.k_scale = k_scale;
    params.v_scale = v_scale;
    params.plan = plan.data();
    params.workspace = workspace.data();
    params.workspace_size = static_cast<int64_t>(workspace.size());
    paged_attention_cuda(params);
  }

  void check() {
    for (size_t s = 0; s < seq_lens.size(); ++s) {
      const int32_t num_query = query_start[s + 1] - query_start[s];
      for (int32_t t = 0; t < num_query; ++t) {
        const int32_t position = seq_lens[s] - num_query + t;
        for (int32_t head = 0; head < num_heads(); ++head) {
          const int64_t at =
              (int64_t{query_start[s] + t} * num_heads() + head) * int64_t{head_size};
          if (int32_t(s) == broken) {
            // The last token at least has met the missing block.
            ASSERT_TRUE(t + 1 < num_query || std::isnan(widen_type(out[at])));
          } else {
            check_row(int32_t(s), position, head, &query[at], &out[at]);
          }
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }

  void check_row(int32_t s, int32_t position, int32_t head, const uint16_t* q,
                 const uint16_t* found) {
    const int32_t kv_head = head / group;
    const int32_t first = window == 0 ? 0 : std::max(0, position + 1 - window);
    std::vector<double> scores, sums(head_size);
    for (int32_t token = first; token <= position; ++token) {
      const uint8_t* key = kv_row(s, token, kv_head);
      double dot = 0;
      for (int32_t i = 0; i < head_size; ++i) dot += widen_type(q[i]) * kv_element(key, i);
      double score = dot * k_scale / std::sqrt(head_size);
      if (!alibi_slopes.empty()) score += double{alibi_slopes[head]} * (token - position);
      if (soft_cap != 0) score = soft_cap * std::tanh(score / soft_cap);
      scores.push_back(score);
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (int32_t token = first; token <= position; ++token) {
      const double weight = std::exp(scores[token - first] - largest);
      const uint8_t* value = kv_row(s, token, num_kv_heads + kv_head);
      for (int32_t i = 0; i < head_size; ++i) sums[i] += weight * kv_element(value, i);
      total += weight;
    }
    // The weights have the query's type; the values are below 5.
    const double tolerance = (kernels.dtype == DType::kBFloat16 ? 0.03 : 0.004) * v_scale;
    for (int32_t i = 0; i < head_size; ++i) {
      ASSERT_NEAR(widen_type(found[i]), sums[i] / total * v_scale, tolerance)
          << "sequence " << s << ", position " << position << ", element " << i;
    }
  }
};

class AttentionRandom : public testing::TestWithParam<Kernels> {
 protected:
  // So few blocks that each has several items, and what one leaves behind meets the next.
  static void SetUpTestSuite() { cuda_on_host::options().num_multiprocessors = 1; }
};

TEST_P(AttentionRandom, IsTheReferencesWithinRounding) {
  uint32_t seed = 0;
  for (const Extras& extras : kCases) {
    SCOPED_TRACE(seed);
    Random random(seed++);
    Step step(random, GetParam(), extras);
    step.run();
    step.check();
    if (HasFatalFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(, AttentionRandom, testing::ValuesIn(kernels()), [](const auto& info) {
  const Kernels& chosen = info.param;
  return "Head" + std::to_string(chosen.head_size) +
         (chosen.dtype == DType::kBFloat16 ? "BFloat16" : "Float16") +
         (chosen.kv_dtype == KvDType::kFloat8E4M3 ? "Fp8Cache" : "");
});

}  // namespace
}  // namespace vllm_lite
