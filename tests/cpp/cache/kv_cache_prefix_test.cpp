// Which prefixes are found again.
#include <random>
#include <set>

#include "cache_test_util.h"

namespace vllm_lite {
namespace {

constexpr KvCacheConfig kConfig{.num_blocks = 8, .block_size = 4};

// PFX-01
TEST(KvCachePrefix, AWholePromptIsNeverAHit) {
  for (int32_t num_blocks = 1; num_blocks <= 3; ++num_blocks) {
    KvCacheManager cache(kConfig);
    const Tokens tokens = sequence_tokens(4 * num_blocks);
    EXPECT_EQ(run_once(cache, tokens), 0);
    EXPECT_EQ(run_once(cache, tokens), 4 * (num_blocks - 1));
    EXPECT_EQ(run_once(cache, sequence_tokens(4 * num_blocks + 1)), 4 * num_blocks);
  }
}

TEST(KvCachePrefix, AHitGivesTheSameBlocksAndSaysHowMany) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(10);
  BlockTable first, second;
  admit(cache, first, tokens);
  cache.mark_computed(first, tokens, kSalt, 10);
  EXPECT_EQ(admit(cache, second, tokens), 8);
  EXPECT_EQ(second.num_hit_blocks, 2);
  EXPECT_EQ(second.num_published, 2);
  EXPECT_EQ(second.blocks[0], first.blocks[0]);
  EXPECT_EQ(second.blocks[1], first.blocks[1]);
  EXPECT_NE(second.blocks[2], first.blocks[2]);
  EXPECT_EQ(cache.stats().prefix_queries, 20);
  EXPECT_EQ(cache.stats().prefix_hits, 8);
}

TEST(KvCachePrefix, OnlyComputedBlocksAreFound) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(13);
  BlockTable first, second;
  admit(cache, first, tokens);
  EXPECT_EQ(admit(cache, second, tokens), 0);  // nothing computed yet
  cache.release(second);
  cache.mark_computed(first, tokens, kSalt, 7);
  EXPECT_EQ(admit(cache, second, tokens), 4);
  check(cache, {&first, &second});
}

TEST(KvCachePrefix, WhoComesLaterIsToldToWaitForTheCommonBlocksUntilTheLastIsComputed) {
  KvCacheManager cache({.num_blocks = 16, .block_size = 4});
  const Tokens tokens = sequence_tokens(15);  // three whole blocks
  Tokens other = sequence_tokens(14);         // of which two are in common
  other[9] = 99;
  BlockTable first, second;
  admit(cache, first, tokens);
  const auto admit_second = [&](int32_t min_awaited, const CacheSalt& salt = kSalt) {
    return cache.admit(second, other, salt, 14, 0, min_awaited);
  };
  EXPECT_EQ(admit_second(1), KvCacheManager::kAwaits);
  EXPECT_TRUE(second.blocks.empty());
  EXPECT_EQ(cache.num_used_blocks(), 4);
  EXPECT_EQ(cache.stats().prefix_queries, 15);
  EXPECT_TRUE(cache.awaits(second));
  cache.mark_computed(first, tokens, kSalt, 7);
  EXPECT_TRUE(cache.awaits(second));
  EXPECT_EQ(admit_second(4), KvCacheManager::kAwaits);  // one block is still to come
  cache.mark_computed(first, tokens, kSalt, 8);
  EXPECT_FALSE(cache.awaits(second));
  EXPECT_EQ(admit_second(1), 8);
  check(cache, {&first, &second});
}

TEST(KvCachePrefix, NobodyWaitsForTooFewTokensForOtherTokensOrUnderAnotherSalt) {
  const Tokens tokens = sequence_tokens(15);
  const auto admitted_second = [&](Tokens second_tokens, int32_t min_awaited, CacheSalt salt,
                                   bool caching = true) {
    KvCacheManager cache({.num_blocks = 16, .block_size = 4, .enable_prefix_caching = caching});
    BlockTable first, second;
    admit(cache, first, tokens);
    return cache.admit(second, second_tokens, salt, 15, 0, min_awaited);
  };
  EXPECT_EQ(admitted_second(tokens, 12, kSalt), KvCacheManager::kAwaits);
  EXPECT_EQ(admitted_second(tokens, 13, kSalt), 0);
  EXPECT_EQ(admitted_second(tokens, 0, kSalt), 0);
  EXPECT_EQ(admitted_second(tokens, 1, {0, 1}), 0);
  EXPECT_EQ(admitted_second(tokens, 1, kSalt, false), 0);
  Tokens other = tokens;
  other[0] = 99;
  EXPECT_EQ(admitted_second(other, 1, kSalt), 0);
}

TEST(KvCachePrefix, ACollisionOfHashesTellsNobodyToWait) {
  const auto cache = KvCacheManagerPeer::create({.num_blocks = 16, .block_size = 4}, 0);
  BlockTable first, second;
  admit(*cache, first, sequence_tokens(15));
  EXPECT_EQ(cache->admit(second, sequence_tokens(15, 50), kSalt, 15, 0, 1), 0);
}

TEST(KvCachePrefix, NobodyWaitsForWhatWasGivenUp) {
  KvCacheManager cache({.num_blocks = 16, .block_size = 4});
  const Tokens tokens = sequence_tokens(15);
  BlockTable first, second;
  admit(cache, first, tokens);
  ASSERT_EQ(cache.admit(second, tokens, kSalt, 15, 0, 1), KvCacheManager::kAwaits);
  cache.release(first);  // aborted, preempted or failed
  EXPECT_FALSE(cache.awaits(second));
  // The same block with the same tokens, but somebody else's: the second is asked anew.
  ASSERT_EQ(admit(cache, first, tokens), 0);
  EXPECT_FALSE(cache.awaits(second));
  ASSERT_EQ(cache.admit(second, tokens, kSalt, 15, 0, 1), KvCacheManager::kAwaits);
  cache.reset_prefix_cache();  // what the first computes from now on is found by nobody
  EXPECT_FALSE(cache.awaits(second));
  EXPECT_EQ(cache.admit(second, tokens, kSalt, 15, 0, 1), 0);
  check(cache, {&first, &second});
}

TEST(KvCachePrefix, OtherSaltsAndOtherTokensMiss) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(9);
  run_once(cache, tokens, {1, 0});
  EXPECT_EQ(run_once(cache, tokens, {0, 1}), 0);
  EXPECT_EQ(run_once(cache, tokens), 0);
  EXPECT_EQ(run_once(cache, tokens, {1, 0}), 8);
  Tokens other = tokens;
  other[4] = 77;
  EXPECT_EQ(run_once(cache, other, {1, 0}), 4);
}

TEST(KvCachePrefix, DisabledCachingFindsAndKeepsNothing) {
  KvCacheManager cache({.num_blocks = 8, .block_size = 4, .enable_prefix_caching = false});
  const Tokens tokens = sequence_tokens(9);
  EXPECT_EQ(run_once(cache, tokens), 0);
  EXPECT_EQ(run_once(cache, tokens), 0);
  EXPECT_EQ(cache.stats().prefix_queries, 0);
  cache.reset_prefix_cache();
  check(cache);
}

TEST(KvCachePrefix, FreeBlocksGoBeforeCachedOnesAndAPrefixIsEatenFromItsTail) {
  KvCacheManager cache(kConfig);
  run_once(cache, sequence_tokens(17));  // four cached, four free
  BlockTable table;
  admit(cache, table, sequence_tokens(16, 100));
  EXPECT_EQ(cache.stats().evictions, 0);
  ASSERT_TRUE(cache.grow(table, 20));
  EXPECT_EQ(cache.stats().evictions, 1);
  cache.release(table);
  EXPECT_EQ(run_once(cache, sequence_tokens(17)), 12);
}

TEST(KvCachePrefix, LeastRecentlyUsedPrefixGoesFirst) {
  KvCacheManager cache(kConfig);
  run_once(cache, sequence_tokens(9));       // A: two cached
  run_once(cache, sequence_tokens(9, 100));  // B: two cached
  run_once(cache, sequence_tokens(9));       // A again
  BlockTable table;
  ASSERT_EQ(admit(cache, table, sequence_tokens(24, 200)), 0);  // four free, two evicted: B
  cache.release(table);
  EXPECT_EQ(run_once(cache, sequence_tokens(9)), 8);
  EXPECT_EQ(run_once(cache, sequence_tokens(9, 100)), 0);
}

// PFX-03: between two attempts the prefix is evicted by others.
TEST(KvCachePrefix, EachAttemptLooksThePrefixUpAnew) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(29);
  run_once(cache, sequence_tokens(17));
  BlockTable running, waiting;
  ASSERT_EQ(admit(cache, running, sequence_tokens(8, 300)), 0);
  EXPECT_EQ(admit(cache, waiting, tokens), -1);  // four hits, four fresh; six available
  ASSERT_TRUE(cache.grow(running, 28));          // two free, three evicted
  EXPECT_EQ(admit(cache, waiting, tokens), -1);
  cache.release(running);
  EXPECT_EQ(admit(cache, waiting, tokens), 4);
  EXPECT_EQ(waiting.num_hit_blocks, 1);
  EXPECT_EQ((std::set<BlockId>(waiting.blocks.begin(), waiting.blocks.end()).size()), 8u);
  check(cache, {&waiting});
}

// PFX-06: 100 prompts over a 4-bit hash, and over none at all.
TEST(KvCachePrefix, HashCollisionsNeverMixPrompts) {
  for (int32_t hash_bits : {4, 0}) {
    const auto cache = KvCacheManagerPeer::create({.num_blocks = 1000, .block_size = 4}, hash_bits);
    std::mt19937 random(3);
    std::vector<Tokens> prompts;
    for (int i = 0; i < 100; ++i) {
      Tokens tokens(21);
      for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 1000);
      tokens[0] = i;  // distinct from the first block on
      EXPECT_EQ(run_once(*cache, tokens), 0) << "prompt " << i;
      prompts.push_back(tokens);
    }
    check(*cache);
    for (const Tokens& tokens : prompts) EXPECT_EQ(run_once(*cache, tokens), 20);
    // Tails of one prompt after heads of another: every block is cached, but not in this place.
    for (size_t i = 1; i < prompts.size(); ++i) {
      Tokens mixed(prompts[i].begin(), prompts[i].begin() + 8);
      mixed.insert(mixed.end(), prompts[i - 1].begin() + 8, prompts[i - 1].end());
      BlockTable table;
      EXPECT_EQ(admit(*cache, table, mixed), 8);
      cache->release(table);
    }
  }
}

// PFX-10: a shared beginning that ends inside a block or at its edge.
TEST(KvCachePrefix, OnlyFullEqualBlocksAreReused) {
  std::mt19937 random(11);
  for (int pair = 0; pair < 200; ++pair) {
    KvCacheManager cache({.num_blocks = 32, .block_size = 4});
    const int32_t common =
        static_cast<int32_t>(random() % 24) / (pair % 2 ? 4 : 1) * (pair % 2 ? 4 : 1);
    const int32_t rest = 1 + static_cast<int32_t>(random() % 12);
    Tokens first = sequence_tokens(common);
    Tokens second = first;
    for (int32_t i = 0; i < rest; ++i) {
      first.push_back(1000 + static_cast<TokenId>(random() % 50));
      second.push_back(2000 + static_cast<TokenId>(random() % 50));
    }
    BlockTable one, two;
    admit(cache, one, first);
    cache.mark_computed(one, first, kSalt, length(first));
    EXPECT_EQ(admit(cache, two, second), common / 4 * 4);
    for (size_t i = 0; i < two.blocks.size(); ++i) {
      const bool shared = i < one.blocks.size() && two.blocks[i] == one.blocks[i];
      EXPECT_EQ(shared, i < static_cast<size_t>(common / 4));
    }
    check(cache, {&one, &two});
  }
}

TEST(KvCachePrefix, AnEqualBlockIsNotPublishedTwiceAndItsChildrenAreFound) {
  KvCacheManager cache(kConfig);
  const Tokens short_tokens = sequence_tokens(5);
  const Tokens long_tokens = sequence_tokens(13);
  BlockTable first, second, third;
  admit(cache, first, short_tokens);
  admit(cache, second, long_tokens);  // the same step: no hit
  cache.mark_computed(first, short_tokens, kSalt, 5);
  cache.mark_computed(second, long_tokens, kSalt, 13);
  check(cache, {&first, &second});
  EXPECT_EQ(admit(cache, third, long_tokens), 12);
  EXPECT_EQ(third.blocks[0], first.blocks[0]);
  EXPECT_EQ(third.blocks[1], second.blocks[1]);
  cache.release(third);
  cache.release(second);  // its first block is free, not cached
  check(cache, {&first});
  EXPECT_EQ(admit(cache, third, long_tokens), 12);
  check(cache, {&first, &third});
}

TEST(KvCachePrefix, TheDuplicateTakesOverWhenThePublishedBlockIsEvicted) {
  KvCacheManager cache({.num_blocks = 6, .block_size = 4});
  const Tokens short_tokens = sequence_tokens(5);
  const Tokens long_tokens = sequence_tokens(9);
  BlockTable first, second, filler;
  admit(cache, first, short_tokens);
  admit(cache, second, long_tokens);
  cache.mark_computed(first, short_tokens, kSalt, 5);
  cache.mark_computed(second, long_tokens, kSalt, 9);
  cache.release(first);  // one cached, two free
  ASSERT_EQ(admit(cache, filler, sequence_tokens(12, 100)), 0);
  ASSERT_EQ(cache.stats().evictions, 1);
  check(cache, {&second, &filler});
  cache.release(second);
  cache.release(filler);
  check(cache);
  EXPECT_EQ(run_once(cache, long_tokens), 8);
}

TEST(KvCachePrefix, ReleasingADuplicateKeepsThePublishedBlockYoungerThanItsChildren) {
  KvCacheManager cache({.num_blocks = 6, .block_size = 4});
  const Tokens short_tokens = sequence_tokens(5);
  const Tokens long_tokens = sequence_tokens(9);
  BlockTable first, second, filler;
  admit(cache, first, short_tokens);
  admit(cache, second, long_tokens);
  cache.mark_computed(first, short_tokens, kSalt, 5);
  cache.mark_computed(second, long_tokens, kSalt, 9);
  cache.release(first);
  cache.release(second);  // cached: the child, then the parent; four free
  ASSERT_EQ(admit(cache, filler, sequence_tokens(20, 100)), 0);  // evicts the child
  cache.release(filler);
  EXPECT_EQ(run_once(cache, long_tokens), 4);
}

TEST(KvCachePrefix, ResetForgetsWhatIsCachedAndWhatIsInUse) {
  KvCacheManager cache({.num_blocks = 16, .block_size = 4});
  Tokens tokens = sequence_tokens(10);
  run_once(cache, sequence_tokens(9, 100));
  BlockTable running, child;
  admit(cache, running, tokens);
  cache.mark_computed(running, tokens, kSalt, 10);
  cache.reset_prefix_cache();
  check(cache, {&running});
  EXPECT_EQ(cache.num_used_blocks(), 3);
  EXPECT_EQ(run_once(cache, sequence_tokens(9, 100)), 0);

  // What the running one computes on top of old KV is not found either, nor through a fork.
  std::vector<BlockCopy> copies;
  ASSERT_TRUE(cache.fork(running, child, 3, copies));
  const Tokens child_tokens = {0, 1, 2, 50, 51};
  ASSERT_TRUE(cache.grow(child, 5));
  cache.mark_computed(child, child_tokens, kSalt, 5);
  for (TokenId token = 10; token < 20; ++token) tokens.push_back(token);
  ASSERT_TRUE(cache.grow(running, 20));
  cache.mark_computed(running, tokens, kSalt, 20);
  check(cache, {&running, &child});
  cache.release(running);
  cache.release(child);
  check(cache);
  EXPECT_EQ(run_once(cache, child_tokens), 0);
  EXPECT_EQ(run_once(cache, tokens), 0);
  EXPECT_EQ(run_once(cache, tokens), 16);
}

}  // namespace
}  // namespace vllm_lite
