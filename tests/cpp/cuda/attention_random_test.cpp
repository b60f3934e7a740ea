// Random mixes of decodes, chunks and prompts against sums in double.
#include <cuda_on_host/options.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention/attention_plan.h"
#include "attention/params.h"
#include "bfloat16.h"

namespace vllm_lite {
namespace {

#ifdef VL_HEAD_SIZE_64_ALONE
constexpr int32_t kHeadSizes[] = {64};
#else
constexpr int32_t kHeadSizes[] = {64, 80, 96, 128, 256};
#endif
constexpr int kCases = 5;
constexpr uint16_t kNaN = 0x7fff;

struct Step {
  int32_t head_size, num_kv_heads, group, block_size, window, num_multiprocessors;
  std::vector<int32_t> query_start{0}, seq_lens, rows;
  int32_t num_blocks = 0, table_stride = 0;
  int32_t broken = -1;  // a sequence whose last block does not exist
  std::vector<int32_t> tables;
  std::vector<uint16_t> query, cache, out;

  Step(Random& random, int32_t size_of_head) : head_size(size_of_head) {
    num_kv_heads = random.integer(1, 2);
    group = random.integer(1, 5);
    block_size = 16 << random.integer(0, 4);
    window = random.integer(0, 2) == 0 ? random.integer(1, 300) : 0;
    num_multiprocessors = random.integer(1, 8);
    const int32_t num_seqs = random.integer(1, 3);
    for (int32_t s = 0; s < num_seqs; ++s) {
      const bool is_decode = random.integer(0, 1) == 0;
      const int32_t num_query = is_decode ? 1 : random.integer(2, 60);
      query_start.push_back(query_start.back() + num_query);
      // Long enough for several ranges of KV, and so for a merge.
      seq_lens.push_back(num_query + random.integer(0, is_decode ? 600 : 100));
      table_stride = std::max(table_stride, (seq_lens.back() + block_size - 1) / block_size);
      rows.push_back(num_seqs - 1 - s);
    }
    num_blocks = num_seqs * table_stride + 1;
    for (int32_t b = 0; b + 1 < num_blocks; ++b) tables.push_back(b);
    std::shuffle(tables.begin(), tables.end(), random.engine());
    query = random.bfloat16s(size_t(query_start.back()) * num_heads() * head_size);
    out.assign(query.size(), kNaN);
    // What lies past a sequence's end may hold anything.
    cache.assign(size_t(num_blocks) * 2 * num_kv_heads * block_size * head_size, kNaN);
    for (int32_t s = 0; s < num_seqs; ++s) {
      for (int32_t token = 0; token < seq_lens[s]; ++token) {
        for (int32_t head = 0; head < 2 * num_kv_heads; ++head) {
          uint16_t* row = kv_row(s, token, head);
          for (int32_t i = 0; i < head_size; ++i) row[i] = narrow(random.normal());
        }
      }
    }
    if (random.integer(0, 1) == 0) {
      broken = num_seqs - 1;
      tables[rows[broken] * table_stride + (seq_lens[broken] - 1) / block_size] = num_blocks;
    }
  }

  int32_t num_heads() const { return num_kv_heads * group; }

  // head: of the keys, or num_kv_heads further on of the values.
  uint16_t* kv_row(int32_t s, int32_t token, int32_t head) {
    const int64_t block = tables[rows[s] * table_stride + token / block_size];
    const int64_t row = (block * 2 * num_kv_heads + head) * block_size + token % block_size;
    return cache.data() + row * head_size;
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
    params.dtype = DType::kBFloat16;
    params.kv_dtype = KvDType::kAsQuery;
    params.k_scale = params.v_scale = 1;
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
            ASSERT_TRUE(t + 1 < num_query || std::isnan(widen(out[at])));
          } else {
            check_row(int32_t(s), position, head / group, &query[at], &out[at]);
          }
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }

  void check_row(int32_t s, int32_t position, int32_t kv_head, const uint16_t* q,
                 const uint16_t* found) {
    const int32_t first = window == 0 ? 0 : std::max(0, position + 1 - window);
    std::vector<double> scores, sums(head_size);
    for (int32_t token = first; token <= position; ++token) {
      const uint16_t* key = kv_row(s, token, kv_head);
      double dot = 0;
      for (int32_t i = 0; i < head_size; ++i) dot += double{widen(q[i])} * widen(key[i]);
      scores.push_back(dot / std::sqrt(head_size));
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (int32_t token = first; token <= position; ++token) {
      const double weight = std::exp(scores[token - first] - largest);
      const uint16_t* value = kv_row(s, token, num_kv_heads + kv_head);
      for (int32_t i = 0; i < head_size; ++i) sums[i] += weight * widen(value[i]);
      total += weight;
    }
    for (int32_t i = 0; i < head_size; ++i) {
      ASSERT_NEAR(widen(found[i]), sums[i] / total, 0.03)
          << "sequence " << s << ", position " << position << ", element " << i;
    }
  }
};

class AttentionRandom : public testing::TestWithParam<int32_t> {
 protected:
  // So few blocks that each has several items, and what one leaves behind meets the next.
  static void SetUpTestSuite() { cuda_on_host::options().num_multiprocessors = 1; }
};

TEST_P(AttentionRandom, IsTheReferencesWithinRounding) {
  for (uint32_t seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Step step(random, GetParam());
    step.run();
    step.check();
    if (HasFatalFailure()) return;
  }
}
INSTANTIATE_TEST_SUITE_P(HeadSize, AttentionRandom, testing::ValuesIn(kHeadSizes));

}  // namespace
}  // namespace vllm_lite
