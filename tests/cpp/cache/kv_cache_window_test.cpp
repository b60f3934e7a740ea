// Blocks that fall out of a sliding window.
#include "cache_test_util.h"

namespace vllm_lite {
namespace {

constexpr KvCacheConfig kConfig{.num_blocks = 16, .block_size = 4, .sliding_window = 6};

TEST(KvCacheWindow, BlocksThatNoLaterQuerySeesComeBack) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(21);
  BlockTable table;
  admit(cache, table, tokens);
  // The last token may be computed again (forks): token 9 sees 4..9.
  cache.mark_computed(table, tokens, kSalt, 9);
  EXPECT_EQ(table.num_out_of_window, 0);
  cache.mark_computed(table, tokens, kSalt, 10);
  EXPECT_EQ(table.num_out_of_window, 1);
  EXPECT_EQ(table.blocks[0], kNoBlock);
  EXPECT_NE(table.blocks[1], kNoBlock);
  EXPECT_EQ(table.blocks.size(), 6u);
  EXPECT_EQ(cache.num_used_blocks(), 5);
  cache.mark_computed(table, tokens, kSalt, 21);
  EXPECT_EQ(table.num_out_of_window, 3);
  EXPECT_EQ(cache.num_used_blocks(), 3);
  check(cache, {&table});
  cache.release(table);
  EXPECT_EQ(cache.num_used_blocks(), 0);
  check(cache);
}

TEST(KvCacheWindow, ALongSequenceRunsInAFewBlocks) {
  KvCacheManager cache({.num_blocks = 4, .block_size = 4, .sliding_window = 6});
  Tokens tokens = sequence_tokens(3);
  BlockTable table;
  ASSERT_EQ(admit(cache, table, tokens), 0);
  for (TokenId token = 3; token < 200; ++token) {
    tokens.push_back(token);
    ASSERT_TRUE(cache.grow(table, length(tokens))) << token;
    cache.mark_computed(table, tokens, kSalt, length(tokens));
    check(cache, {&table});
  }
}

TEST(KvCacheWindow, WithoutPrefixCachingTheyAreFreeAtOnce) {
  KvCacheManager cache(
      {.num_blocks = 4, .block_size = 4, .enable_prefix_caching = false, .sliding_window = 5});
  const Tokens tokens = sequence_tokens(16);
  BlockTable table;
  ASSERT_EQ(admit(cache, table, tokens), 0);
  cache.mark_computed(table, tokens, kSalt, 16);
  EXPECT_EQ(table.num_out_of_window, 2);
  EXPECT_TRUE(cache.grow(table, 24));
  EXPECT_EQ(cache.stats().evictions, 0);
  check(cache, {&table});
}

TEST(KvCacheWindow, AHitTakesOnlyTheBlocksThatAreSeen) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(21);
  run_once(cache, tokens);
  BlockTable table;
  EXPECT_EQ(admit(cache, table, tokens), 20);
  EXPECT_EQ(table.num_hit_blocks, 5);
  EXPECT_EQ(table.num_published, 5);
  EXPECT_EQ(table.num_out_of_window, 3);
  EXPECT_EQ((Blocks{table.blocks.begin(), table.blocks.begin() + 3}), Blocks(3, kNoBlock));
  EXPECT_EQ(cache.num_used_blocks(), 3);  // two hits and a fresh one
  check(cache, {&table});
}

TEST(KvCacheWindow, RoomIsCountedWithoutTheSkippedHits) {
  KvCacheManager cache({.num_blocks = 6, .block_size = 4, .sliding_window = 6});
  const Tokens tokens = sequence_tokens(21);
  run_once(cache, tokens);  // five cached, one free
  BlockTable table;
  EXPECT_EQ(cache.admit(table, tokens, kSalt, 21, 4), -1);
  EXPECT_EQ(cache.admit(table, tokens, kSalt, 21, 3), 20);
  EXPECT_EQ(cache.num_available_blocks(), 3);
}

TEST(KvCacheWindow, APrefixIsEatenFromItsTailWhileItsSequenceStillRuns) {
  KvCacheManager cache({.num_blocks = 8, .block_size = 4, .sliding_window = 4});
  Tokens tokens = sequence_tokens(20);
  BlockTable running, filler;
  admit(cache, running, tokens);
  for (int32_t computed = 1; computed <= 20; ++computed) {
    cache.mark_computed(running, tokens, kSalt, computed);  // blocks 0..3 come back one by one
  }
  ASSERT_EQ(cache.num_used_blocks(), 1);
  ASSERT_EQ(admit(cache, filler, sequence_tokens(20, 100)), 0);  // three free, two evicted
  ASSERT_EQ(cache.stats().evictions, 2);
  cache.release(filler);
  BlockTable table;
  EXPECT_EQ(admit(cache, table, sequence_tokens(17)), 8);
  check(cache, {&running, &table});
}

TEST(KvCacheWindow, ReleaseKeepsTheWholePrefixTogether) {
  KvCacheManager cache({.num_blocks = 12, .block_size = 4, .sliding_window = 4});
  const Tokens tokens = sequence_tokens(17);
  BlockTable running, filler;
  admit(cache, running, tokens);
  cache.mark_computed(running, tokens, kSalt, 17);  // 0..2 cached
  run_once(cache, sequence_tokens(17, 100));        // later than those, earlier than the release
  cache.release(running);
  ASSERT_EQ(admit(cache, filler, sequence_tokens(32, 200)), 0);  // four free, four evicted
  ASSERT_EQ(cache.stats().evictions, 4);
  cache.release(filler);
  BlockTable table;
  EXPECT_EQ(admit(cache, table, tokens), 16);
  check(cache, {&table});
}

TEST(KvCacheWindow, AWindowBelowABlockStillPublishesEveryBlock) {
  KvCacheManager cache({.num_blocks = 16, .block_size = 4, .sliding_window = 1});
  const Tokens tokens = sequence_tokens(21);
  BlockTable table;
  admit(cache, table, tokens);
  for (int32_t computed = 1; computed <= 21; ++computed) {
    cache.mark_computed(table, tokens, kSalt, computed);
    check(cache, {&table});
  }
  cache.release(table);
  EXPECT_EQ(admit(cache, table, tokens), 20);
}

TEST(KvCacheWindow, AForkThatComputesTheLastTokenAgainAlwaysHasItsBlocks) {
  for (int32_t length_of_prompt = 1; length_of_prompt <= 40; ++length_of_prompt) {
    KvCacheManager cache(kConfig);
    const Tokens tokens = sequence_tokens(length_of_prompt);
    BlockTable parent, child;
    std::vector<BlockCopy> copies;
    ASSERT_EQ(admit(cache, parent, tokens), 0);
    cache.mark_computed(parent, tokens, kSalt, length_of_prompt);
    ASSERT_TRUE(cache.fork(parent, child, length_of_prompt - 1, copies)) << length_of_prompt;
    check(cache, {&parent, &child});
    for (int32_t position = std::max(0, length_of_prompt - 6); position < length_of_prompt - 1;
         ++position) {
      EXPECT_NE(child.blocks[static_cast<size_t>(position / 4)], kNoBlock);
    }
    cache.release(parent);
    cache.release(child);
    check(cache);
  }
}

TEST(KvCacheWindow, AForkThatWouldMissBlocksIsRefused) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(24);
  BlockTable parent, child;
  std::vector<BlockCopy> copies;
  admit(cache, parent, tokens);
  cache.mark_computed(parent, tokens, kSalt, 24);
  EXPECT_FALSE(cache.fork(parent, child, 13, copies));
  EXPECT_TRUE(child.blocks.empty());
  EXPECT_TRUE(copies.empty());
  check(cache, {&parent, &child});
}

}  // namespace
}  // namespace vllm_lite
