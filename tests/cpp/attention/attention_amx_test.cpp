// The AMX kernel of attention with its tile instructions in software: right on a machine without
// AMX. Where there is AMX, the Python tests run the kernel itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../core/numbers.h"
#include "attention/attention_items.h"
#include "core/isa.h"
#include "core/kv_layout_cpu.h"

namespace vllm_lite {
namespace amx_on_host_kernels {
void attend_item(const AttentionCall& call);  // attention_amx_on_host.cpp
void merge_item(const AttentionCall& call);
}  // namespace amx_on_host_kernels
namespace {

constexpr int32_t kHeads = 6, kKvHeads = 2, kGroup = kHeads / kKvHeads, kBlockSize = 16;

struct Shape {
  int32_t num_tokens, num_query, head_size, window;
};

// One sequence, the last num_query of whose tokens are asked.
struct Problem {
  Shape shape;
  std::vector<uint16_t> query, keys, values;  // [token, head, head_size]

  explicit Problem(Shape s) : shape(s) {
    Random random(static_cast<uint32_t>(s.num_tokens * 31 + s.num_query + s.head_size));
    const auto numbers = [&](int32_t heads) {
      return random.bfloat16s(static_cast<size_t>(s.num_tokens * heads * s.head_size));
    };
    query = numbers(kHeads);
    keys = numbers(kKvHeads);
    values = numbers(kKvHeads);
  }

  size_t index(int32_t token, int32_t head, int32_t d, int32_t heads) const {
    return static_cast<size_t>((token * heads + head) * shape.head_size + d);
  }

  // The cache's blocks, in the reverse order of the tokens; slots past the sequence are NaN.
  std::vector<uint16_t> cache(int32_t num_blocks) const {
    const int32_t size = shape.head_size;
    std::vector<uint16_t> blocks(static_cast<size_t>(num_blocks * 2 * kKvHeads * kBlockSize * size),
                                 0x7fc0);
    for (int32_t token = 0; token < shape.num_tokens; ++token) {
      const int32_t block = num_blocks - 1 - token / kBlockSize, slot = token % kBlockSize;
      for (int32_t head = 0; head < kKvHeads; ++head) {
        const int32_t at = (block * 2 * kKvHeads + head) * kBlockSize * size;
        const int32_t values_at = at + kKvHeads * kBlockSize * size;
        for (int32_t d = 0; d < size; ++d) {
          const size_t from = index(token, head, d, kKvHeads);
          blocks[static_cast<size_t>(at + (d / 2 * kStripTokens + slot) * 2 + d % 2)] = keys[from];
          blocks[static_cast<size_t>(values_at + (slot / 2 * size + d) * 2 + slot % 2)] =
              values[from];
        }
      }
    }
    return blocks;
  }

  // out [num_query, heads, head_size] of the last num_query tokens of the first `length`.
  std::vector<uint16_t> attend(int32_t length, int32_t num_query) const {
    const int32_t num_blocks = (shape.num_tokens + kBlockSize - 1) / kBlockSize;
    const std::vector<uint16_t> blocks = cache(num_blocks);
    std::vector<int32_t> table(static_cast<size_t>(num_blocks));
    for (int32_t i = 0; i < num_blocks; ++i) table[static_cast<size_t>(i)] = num_blocks - 1 - i;
    std::vector<uint16_t> out(static_cast<size_t>(num_query * kHeads * shape.head_size), 0x7fc0);
    const int32_t query_start[] = {0, num_query}, row = 0;
    PagedAttentionParams params{};
    params.out = out.data();
    params.query = query.data() + index(length - num_query, 0, 0, kHeads);
    params.kv_cache = blocks.data();
    params.block_tables = table.data();
    params.rows = &row;
    params.query_start = query_start;
    params.seq_lens = &length;
    params.out_token_stride = params.query_token_stride = kHeads * shape.head_size;
    params.block_table_stride = params.num_blocks = num_blocks;
    params.num_tokens = num_query;
    params.max_rows = params.num_seqs = 1;
    params.num_heads = kHeads;
    params.num_kv_heads = kKvHeads;
    params.head_size = shape.head_size;
    params.block_size = kBlockSize;
    params.scale = 0.125f;
    params.sliding_window = shape.window;
    params.dtype = DType::kBFloat16;
    AttentionItems plan;
    plan.plan(params);
    const auto buffer = [](int64_t floats) {
      return std::unique_ptr<float[], decltype(&std::free)>(
          static_cast<float*>(
              std::aligned_alloc(64, static_cast<size_t>((floats * 4 + 63) / 64 * 64 + 64))),
          &std::free);
    };
    const auto records = buffer(plan.num_records() * record_floats(shape.head_size));
    const auto scratch = buffer(attention_scratch_floats(shape.head_size));
    const auto run = [&](const std::vector<AttentionItem>& items, auto kernel) {
      for (const AttentionItem& item : items) {
        kernel({&params, plan.rows().data(), &item, nullptr, records.get(), scratch.get()});
      }
    };
    run(plan.items(), amx_on_host_kernels::attend_item);
    run(plan.merges(), amx_on_host_kernels::merge_item);
    return out;
  }

  // One row, in double precision.
  std::vector<double> exact(int32_t token, int32_t head) const {
    const int32_t first = shape.window == 0 ? 0 : std::max(0, token + 1 - shape.window);
    std::vector<double> out(static_cast<size_t>(shape.head_size));
    double sum = 0;
    for (int32_t t = first; t <= token; ++t) {
      double score = 0;
      for (int32_t d = 0; d < shape.head_size; ++d) {
        score += double{widen(query[index(token, head, d, kHeads)])} *
                 double{widen(keys[index(t, head / kGroup, d, kKvHeads)])};
      }
      const double weight = std::exp(score * 0.125);
      sum += weight;
      for (int32_t d = 0; d < shape.head_size; ++d) {
        out[static_cast<size_t>(d)] +=
            weight * double{widen(values[index(t, head / kGroup, d, kKvHeads)])};
      }
    }
    for (double& x : out) x /= sum;
    return out;
  }
};

class AttentionAmxTest : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    if (best_isa() < Isa::kAvx512Bf16) GTEST_SKIP() << "needs AVX-512-BF16";
  }
};

TEST_P(AttentionAmxTest, IsAttention) {
  const Problem problem(GetParam());
  const auto [num_tokens, num_query, head_size, window] = problem.shape;
  const std::vector<uint16_t> out = problem.attend(num_tokens, num_query);
  for (int32_t i = 0; i < num_query; ++i) {
    for (int32_t head = 0; head < kHeads; ++head) {
      const std::vector<double> exact = problem.exact(num_tokens - num_query + i, head);
      for (int32_t d = 0; d < head_size; ++d) {
        ASSERT_NEAR(widen(out[problem.index(i, head, d, kHeads)]), exact[static_cast<size_t>(d)],
                    0.02)
            << i << " " << head << " " << d;
      }
    }
  }
}

// Also where a later token's value, in the same strip, is not finite.
TEST_P(AttentionAmxTest, GivesARowTheSameBitsAlone) {
  Problem problem(GetParam());
  const auto [num_tokens, num_query, head_size, window] = problem.shape;
  for (const float last : {0.0f, std::numeric_limits<float>::infinity()}) {
    for (int32_t d = 0; d < head_size; ++d) {
      problem.values[problem.index(num_tokens - 1, 0, d, kKvHeads)] = narrow(last);
    }
    const std::vector<uint16_t> together = problem.attend(num_tokens, num_query);
    const auto row = static_cast<size_t>(kHeads * head_size);
    for (int32_t i : {0, num_query / 2, num_query - 1}) {
      const std::vector<uint16_t> alone = problem.attend(num_tokens - num_query + i + 1, 1);
      EXPECT_EQ(std::memcmp(alone.data(), together.data() + static_cast<size_t>(i) * row,
                            row * sizeof(uint16_t)),
                0)
          << i << " " << last;
      const bool sees_last = i == num_query - 1 && last != 0;
      EXPECT_EQ(std::isfinite(widen(alone[0])), !sees_last) << i;
    }
  }
}

// Tokens around strips of 16, tiles of 64 and ranges of 256; rows around blocks of 16 and items of
// 72; a head that ends with 16 elements, and one of more than four tiles.
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionAmxTest,
                         testing::Values(Shape{1, 1, 64, 0}, Shape{17, 5, 64, 0},
                                         Shape{64, 6, 80, 0}, Shape{130, 24, 96, 0},
                                         Shape{150, 150, 64, 0}, Shape{300, 30, 128, 0},
                                         Shape{200, 50, 32, 40}, Shape{600, 2, 64, 0}),
                         [](const auto& test) {
                           const Shape& s = test.param;
                           return std::to_string(s.num_tokens) + "x" + std::to_string(s.num_query) +
                                  "x" + std::to_string(s.head_size) + "x" +
                                  std::to_string(s.window);
                         });

}  // namespace
}  // namespace vllm_lite
