// The kernels beside attention and sampling, at sizes that do not fill their blocks and chunks.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "../core/numbers.h"
#include "cache/store_kv.h"
#include "ops/moe.h"
#include "ops/ops.h"
#include "ops/rope_store_kv.h"

namespace vllm_lite {
namespace {

constexpr uint16_t kNaN = 0x7fff;
constexpr int32_t kSizes[] = {64, 100, 333, 2048};

TEST(SmallKernels, RmsNormWithResidual) {
  for (const int32_t size : kSizes) {
    SCOPED_TRACE(size);
    constexpr int32_t kRows = 3;
    Random random(1);
    const std::vector<uint16_t> input = random.bfloat16s(kRows * size);
    const std::vector<uint16_t> weight = random.bfloat16s(size);
    const std::vector<uint16_t> before = random.bfloat16s(kRows * size);
    std::vector<uint16_t> residual = before, out(kRows * size, kNaN);
    RmsNormParams params{};
    params.out = out.data();
    params.input = input.data();
    params.residual = residual.data();
    params.weight = weight.data();
    params.out_outer_stride = params.input_outer_stride = params.residual_outer_stride = size;
    params.num_outer = kRows;
    params.num_inner = 1;
    params.size = size;
    params.epsilon = 1e-5f;
    params.dtype = DType::kBFloat16;
    rms_norm_cuda(params);
    for (int32_t row = 0; row < kRows; ++row) {
      double squares = 0;
      for (int32_t i = row * size; i < (row + 1) * size; ++i) {
        ASSERT_EQ(residual[i], narrow(widen(before[i]) + widen(input[i])));
        squares += std::pow(widen(residual[i]), 2);
      }
      const double factor = 1 / std::sqrt(squares / size + 1e-5);
      for (int32_t i = 0; i < size; ++i) {
        const auto expected =
            static_cast<float>(widen(residual[row * size + i]) * factor * widen(weight[i]));
        ASSERT_NEAR(widen(out[row * size + i]), expected, rounding_of(expected));
      }
    }
  }
}

TEST(SmallKernels, SiluMul) {
  for (const int32_t size : kSizes) {
    SCOPED_TRACE(size);
    constexpr int32_t kRows = 3;
    Random random(2);
    const std::vector<uint16_t> gate_up = random.bfloat16s(kRows * 2 * size);
    std::vector<uint16_t> out(kRows * size, kNaN);
    SiluMulParams params{};
    params.out = out.data();
    params.gate_up = gate_up.data();
    params.out_token_stride = size;
    params.gate_up_token_stride = 2 * size;
    params.num_tokens = kRows;
    params.size = size;
    params.dtype = DType::kBFloat16;
    silu_mul_cuda(params);
    for (int32_t i = 0; i < kRows * size; ++i) {
      const uint16_t* row = &gate_up[i / size * 2 * size];
      const float gate = widen(row[i % size]), up = widen(row[size + i % size]);
      const float expected = gate / (1 + std::exp(-gate)) * up;
      ASSERT_NEAR(widen(out[i]), expected, rounding_of(expected));
    }
  }
}

TEST(SmallKernels, Embedding) {
  for (const int32_t size : kSizes) {
    constexpr int32_t kVocabulary = 7;
    Random random(3);
    const std::vector<uint16_t> table = random.bfloat16s(kVocabulary * size);
    const std::vector<int32_t> last_tokens = {4, 2};
    // Row 1's last token, and ids that lead out of the table and of the rows: zeros.
    const std::vector<int32_t> ids = {6, 0, -2, kVocabulary, -3}, tokens = {6, 0, 2, -1, -1};
    std::vector<uint16_t> out(ids.size() * size, kNaN);
    EmbeddingParams params{};
    params.out = out.data();
    params.table = table.data();
    params.token_ids = ids.data();
    params.last_tokens = last_tokens.data();
    params.out_token_stride = size;
    params.num_tokens = static_cast<int32_t>(ids.size());
    params.size = size;
    params.vocab_size = kVocabulary;
    params.max_rows = 2;
    params.out_dtype = params.table_dtype = DType::kBFloat16;
    embedding_cuda(params);
    for (size_t i = 0; i < out.size(); ++i) {
      const int32_t token = tokens[i / size];
      ASSERT_EQ(out[i], token < 0 ? 0 : table[token * size + i % size]);
    }
  }
}

// Heads of a fused row; slots in the middle, at the end and nowhere.
struct KvStep {
  int32_t head_size, block_size = 8, num_blocks = 3, num_tokens = 4, kv_heads = 2, heads = 3;
  std::vector<uint16_t> qkv, cache;
  std::vector<int64_t> slots = {23, -1, 0, 9};
  std::vector<int32_t> positions = {5, 0, 11, 3};
  std::vector<float> cos_sin;

  explicit KvStep(int32_t size_of_head) : head_size(size_of_head) {
    Random random(4);
    qkv = random.bfloat16s(size_t(num_tokens) * stride());
    cache.assign(size_t(num_blocks) * 2 * kv_heads * block_size * head_size, 0);
    for (int32_t i = 0; i < 12 * head_size; ++i) cos_sin.push_back(random.normal());
  }
  int32_t stride() const { return (heads + 2 * kv_heads) * head_size; }
  uint16_t* key() { return qkv.data() + heads * head_size; }

  StoreKvParams store() {
    StoreKvParams params{};
    params.key = key();
    params.value = key() + kv_heads * head_size;
    params.kv_cache = cache.data();
    params.slot_mapping = slots.data();
    params.key_token_stride = params.value_token_stride = stride();
    params.num_blocks = num_blocks;
    params.num_tokens = num_tokens;
    params.num_kv_heads = kv_heads;
    params.head_size = head_size;
    params.block_size = block_size;
    params.dtype = DType::kBFloat16;
    params.k_scale = params.v_scale = 1;
    return params;
  }
  RopeParams rope() {
    RopeParams params{};
    params.query = qkv.data();
    params.key = key();
    params.positions = positions.data();
    params.cos_sin = cos_sin.data();
    params.query_token_stride = params.key_token_stride = stride();
    params.max_position = 12;
    params.num_tokens = num_tokens;
    params.num_heads = heads;
    params.num_kv_heads = kv_heads;
    params.head_size = params.rotary_size = head_size;
    params.dtype = DType::kBFloat16;
    return params;
  }
};

TEST(SmallKernels, RopeAndStoreApartAndInOne) {
  for (const int32_t head_size : {50, 64, 128}) {
    SCOPED_TRACE(head_size);
    KvStep apart(head_size), fused(head_size);
    rope_cuda(apart.rope());
    store_kv_cuda(apart.store());
    rope_store_kv_cuda({fused.rope(), fused.store()});
    EXPECT_EQ(apart.cache, fused.cache);
    const KvStep before(head_size);
    const int32_t half = head_size / 2;
    for (int32_t token = 0; token < apart.num_tokens; ++token) {
      const float* cos = &apart.cos_sin[apart.positions[token] * head_size];
      for (int32_t i = 0; i < apart.heads * head_size; ++i) {
        const int32_t at = token * apart.stride() + i, r = i % head_size % half;
        ASSERT_EQ(apart.qkv[at], fused.qkv[at]);
        const bool first = i % head_size < half;
        const float here = widen(before.qkv[at]);
        const float there = widen(before.qkv[first ? at + half : at - half]);
        const float expected = here * cos[r] + (first ? -there : there) * cos[half + r];
        ASSERT_NEAR(widen(apart.qkv[at]), expected, rounding_of(std::abs(expected) + 1));
      }
      const int64_t slot = apart.slots[token];
      if (slot < 0) continue;
      for (int32_t i = 0; i < 2 * apart.kv_heads * head_size; ++i) {
        const int64_t row = (slot / 8 * 2 * apart.kv_heads + i / head_size) * 8 + slot % 8;
        const int32_t at = token * apart.stride() + apart.heads * head_size + i;
        ASSERT_EQ(apart.cache[row * head_size + i % head_size], apart.qkv[at]);
      }
    }
  }
}

TEST(SmallKernels, CopyBlocks) {
  constexpr int32_t kLayers = 2, kBlocks = 5, kWords = 333;
  std::vector<uint16_t> arena = Random(5).bfloat16s(size_t{kLayers} * kBlocks * kWords);
  std::vector<uint16_t> expected = arena;
  // A chain: the second pair reads what the first has written.
  const std::vector<int32_t> pairs = {0, 3, 3, 4};
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    uint16_t* blocks = &expected[layer * kBlocks * kWords];
    std::copy(blocks, blocks + kWords, blocks + 3 * kWords);
    std::copy(blocks, blocks + kWords, blocks + 4 * kWords);
  }
  CopyBlocksParams params{};
  params.kv_cache = arena.data();
  params.block_pairs = pairs.data();
  params.block_bytes = kWords * 2;
  params.num_blocks = kBlocks;
  params.num_layers = kLayers;
  params.num_pairs = 2;
  copy_blocks_cuda(params);
  EXPECT_EQ(arena, expected);
}

TEST(SmallKernels, ExpertsThereAndBack) {
  // Experts that give back what they get: the sum of a token's weights times the token.
  constexpr int32_t kTokens = 37, kExperts = 11, kChoices = 3, kSize = 100;
  constexpr int32_t kPairs = kTokens * kChoices;
  Random random(6);
  const std::vector<uint16_t> logits = random.bfloat16s(kTokens * kExperts);
  const std::vector<uint16_t> tokens = random.bfloat16s(kTokens * kSize);
  std::vector<float> weights(kPairs, NAN);
  std::vector<int32_t> ids(kPairs, -1), order(kPairs, -1), rows(kPairs, -1), start(kExperts + 1);
  std::vector<uint16_t> gathered(kPairs * kSize, kNaN), out(kTokens * kSize, kNaN);
  route_experts_cuda({weights.data(), ids.data(), logits.data(), kExperts, kTokens, kExperts,
                      kChoices, true, DType::kBFloat16, 0});
  permute_tokens_cuda({ids.data(), order.data(), rows.data(), start.data(), kPairs, kExperts, 0});
  ASSERT_EQ(start.front(), 0);
  ASSERT_EQ(start.back(), kPairs);
  for (int32_t row = 0; row < kPairs; ++row) {
    ASSERT_EQ(rows[order[row]], row);
    ASSERT_GE(row, start[ids[order[row]]]);
    ASSERT_LT(row, start[ids[order[row]] + 1]);
  }
  gather_rows_cuda({gathered.data(), tokens.data(), order.data(), kSize * 2, kSize * 2, kSize * 2,
                    kPairs, kTokens, kChoices, 0});
  combine_experts_cuda({out.data(), gathered.data(), rows.data(), weights.data(), kSize, kSize,
                        kTokens, kPairs, kSize, kChoices, DType::kBFloat16, 0});
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(widen(out[i]), widen(tokens[i]), rounding_of(widen(tokens[i])));
  }
}

}  // namespace
}  // namespace vllm_lite
