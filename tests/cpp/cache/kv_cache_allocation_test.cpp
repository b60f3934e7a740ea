// Counts heap allocations: none in steady state.
#include <new>

#include "cache_test_util.h"
#include "counting_new.h"

namespace vllm_lite {
namespace {

TEST(KvCacheAllocation, TheCounterCounts) {
  const int64_t before = num_allocations();
  ::operator delete(::operator new(4));
  std::vector<int> numbers(10);
  EXPECT_EQ(num_allocations(), before + 2);
}

class KvCacheAllocation : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Window, KvCacheAllocation, testing::Values(0, 20));

TEST_P(KvCacheAllocation, ReservedTablesNeverTouchTheHeap) {
  KvCacheManager cache({.num_blocks = 64, .block_size = 4, .sliding_window = GetParam()});
  constexpr int32_t kMaxTokens = 120;
  BlockTable table, twin, child;
  for (BlockTable* each : {&table, &twin, &child}) each->reserve(cache.blocks_for(kMaxTokens));
  std::vector<BlockCopy> copies;
  copies.reserve(1);
  Tokens tokens;
  tokens.reserve(kMaxTokens);

  const int64_t before = num_allocations();
  for (int round = 0; round < 50; ++round) {
    tokens.clear();
    for (TokenId token = 0; token < 50; ++token) tokens.push_back(token + round / 2 * 100);
    ASSERT_GE(cache.admit(table, tokens, kSalt, 50), 0);
    ASSERT_GE(cache.admit(twin, tokens, kSalt, 50), 0);
    cache.mark_computed(table, tokens, kSalt, 50);
    cache.mark_computed(twin, tokens, kSalt, 50);
    copies.clear();
    ASSERT_TRUE(cache.fork(table, child, 49, copies));
    while (tokens.size() < kMaxTokens) {
      tokens.push_back(round);
      if (!cache.grow(table, length(tokens))) break;
      cache.mark_computed(table, tokens, kSalt, length(tokens));
    }
    cache.release(twin);
    cache.release(table);
    cache.release(child);
    if (round == 40) cache.reset_prefix_cache();
  }
  EXPECT_EQ(num_allocations(), before);
  EXPECT_GT(cache.stats().evictions, 0);
  EXPECT_GT(cache.stats().prefix_hits, 0);
}

}  // namespace
}  // namespace vllm_lite
