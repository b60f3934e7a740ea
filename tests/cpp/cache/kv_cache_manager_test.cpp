// Room: admission, growth, forks, release. What prefixes are found: kv_cache_prefix_test.cpp.
#include "cache/kv_cache_manager.h"

#include <random>
#include <string>

#include "cache_test_util.h"
#include "core/check.h"

namespace vllm_lite {
namespace {

constexpr KvCacheConfig kConfig{.num_blocks = 8, .block_size = 4};

TEST(KvCacheManager, RefusesAConfigurationThatCannotWorkAndNamesTheValue) {
  const auto message = [](const KvCacheConfig& config) -> std::string {
    try {
      KvCacheManager cache(config);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message({.num_blocks = 0}).find("num_blocks=0"), std::string::npos);
  EXPECT_NE(message({.num_blocks = -3}).find("num_blocks=-3"), std::string::npos);
  EXPECT_NE(message({.num_blocks = 1, .block_size = 0}).find("block_size=0"), std::string::npos);
  EXPECT_NE(message({.num_blocks = 1, .block_size = 12}).find("block_size=12"), std::string::npos);
  EXPECT_NE(message({.num_blocks = 1, .sliding_window = -1}).find("sliding_window=-1"),
            std::string::npos);
  EXPECT_EQ(message({.num_blocks = 1, .block_size = 1}), "");
}

TEST(KvCacheManager, CountsBlocks) {
  KvCacheManager cache(kConfig);
  EXPECT_EQ(cache.num_blocks(), 8);
  EXPECT_EQ(cache.block_size(), 4);
  EXPECT_EQ(cache.blocks_for(0), 0);
  EXPECT_EQ(cache.blocks_for(4), 1);
  EXPECT_EQ(cache.blocks_for(5), 2);
  BlockTable table;
  EXPECT_EQ(admit(cache, table, sequence_tokens(9)), 0);
  EXPECT_EQ(table.blocks.size(), 3u);
  EXPECT_EQ(cache.num_used_blocks(), 3);
  EXPECT_EQ(cache.num_available_blocks(), 5);
  check(cache, {&table});
}

TEST(KvCacheManager, AdmitReservesMoreThanTheTokensWhenAsked) {
  KvCacheManager cache(kConfig);
  BlockTable table;
  EXPECT_EQ(cache.admit(table, sequence_tokens(5), kSalt, 13), 0);
  EXPECT_EQ(table.blocks.size(), 4u);
}

TEST(KvCacheManager, AdmitKeepsTheHeadroom) {
  KvCacheManager cache(kConfig);
  BlockTable table;
  EXPECT_EQ(cache.admit(table, sequence_tokens(24), kSalt, 24, 3), -1);
  EXPECT_EQ(cache.num_available_blocks(), 8);
  EXPECT_EQ(cache.admit(table, sequence_tokens(24), kSalt, 24, 2), 0);
  EXPECT_EQ(cache.num_available_blocks(), 2);
}

TEST(KvCacheManager, GrowAddsBlocksOrChangesNothing) {
  KvCacheManager cache(kConfig);
  BlockTable table;
  admit(cache, table, sequence_tokens(4));
  EXPECT_TRUE(cache.grow(table, 4));
  EXPECT_EQ(table.blocks.size(), 1u);
  EXPECT_TRUE(cache.grow(table, 5));
  EXPECT_EQ(table.blocks.size(), 2u);
  EXPECT_FALSE(cache.grow(table, 33));
  EXPECT_EQ(table.blocks.size(), 2u);
  EXPECT_EQ(cache.num_available_blocks(), 6);
  EXPECT_TRUE(cache.grow(table, 32));
  EXPECT_EQ(cache.num_available_blocks(), 0);
  EXPECT_TRUE(cache.grow(table, 1));
  check(cache, {&table});
}

TEST(KvCacheManager, ShrinkGivesBackTheBlocksBehind) {
  KvCacheManager cache(kConfig);
  BlockTable table;
  const std::vector<TokenId> tokens = sequence_tokens(8);
  admit(cache, table, tokens);
  const std::vector<BlockId> before = table.blocks;
  ASSERT_TRUE(cache.grow(table, 17));
  EXPECT_EQ(cache.num_available_blocks(), 3);
  cache.shrink(table, 8);
  EXPECT_EQ(table.blocks, before);
  EXPECT_EQ(cache.num_available_blocks(), 6);
  cache.shrink(table, 20);  // it has no more
  EXPECT_EQ(table.blocks, before);
  cache.mark_computed(table, tokens, kSalt, 8);
  EXPECT_THROW(cache.shrink(table, 4), InternalError);  // others may find it
  check(cache, {&table});
}

TEST(KvCacheManager, ReleaseEmptiesTheTableAndMayBeRepeated) {
  KvCacheManager cache(kConfig);
  BlockTable table;
  admit(cache, table, sequence_tokens(20));
  cache.release(table);
  EXPECT_TRUE(table.blocks.empty());
  EXPECT_EQ(table.num_published, 0);
  cache.release(table);
  EXPECT_EQ(cache.num_used_blocks(), 0);
  EXPECT_EQ(admit(cache, table, sequence_tokens(20)), 0);
  check(cache, {&table});
}

// KVA-05: the prefix part would fit, the rest does not.
TEST(KvCacheManager, AFailedAdmissionLeavesEverythingAsItWas) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(21);
  ASSERT_EQ(run_once(cache, sequence_tokens(13)), 0);  // three blocks cached
  BlockTable holder;
  ASSERT_EQ(admit(cache, holder, sequence_tokens(12, 500)), 0);  // five available: two free
  const KvCacheStats before = cache.stats();
  BlockTable table;
  // Three hits and three fresh: taking the hits leaves two.
  EXPECT_EQ(admit(cache, table, tokens), -1);
  EXPECT_TRUE(table.blocks.empty());
  EXPECT_EQ(table.num_published, 0);
  EXPECT_EQ(table.num_hit_blocks, 0);
  EXPECT_EQ(cache.num_available_blocks(), 5);
  EXPECT_EQ(cache.stats().prefix_queries, before.prefix_queries);
  EXPECT_EQ(cache.stats().prefix_hits, before.prefix_hits);
  EXPECT_EQ(cache.stats().evictions, before.evictions);
  check(cache, {&table, &holder});
  // Nothing was evicted for it, nor the order of eviction changed: the tail goes first.
  BlockTable other;
  ASSERT_EQ(admit(cache, other, sequence_tokens(12, 900)), 0);  // evicts one
  cache.release(other);
  EXPECT_EQ(admit(cache, table, sequence_tokens(13)), 8);
  check(cache, {&table, &holder});
}

TEST(KvCacheManager, HitsThatNobodyHoldsCountAsTakenAndHeldOnesDoNot) {
  KvCacheManager cache({.num_blocks = 4, .block_size = 4});
  const Tokens tokens = sequence_tokens(9);
  BlockTable first, second;
  ASSERT_EQ(admit(cache, first, tokens), 0);
  cache.mark_computed(first, tokens, kSalt, 9);
  ASSERT_EQ(cache.num_available_blocks(), 1);
  EXPECT_EQ(admit(cache, second, tokens), 8);  // shares two, takes one
  EXPECT_EQ(cache.num_available_blocks(), 0);
  check(cache, {&first, &second});
  cache.release(first);
  cache.release(second);
  EXPECT_EQ(cache.num_available_blocks(), 4);
  EXPECT_EQ(cache.admit(first, tokens, kSalt, 9, 2), -1);
  EXPECT_EQ(cache.admit(first, tokens, kSalt, 9, 1), 8);
  EXPECT_EQ(cache.num_available_blocks(), 1);
}

// ABT-05: a waiting request that matched a prefix is aborted before it ever got blocks.
TEST(KvCacheManager, AnAbortWhileWaitingForRoomLeavesNoReference) {
  KvCacheManager cache(kConfig);
  ASSERT_EQ(run_once(cache, sequence_tokens(17)), 0);
  BlockTable running;
  ASSERT_EQ(admit(cache, running, sequence_tokens(16, 700)), 0);
  ASSERT_EQ(cache.num_available_blocks(), 4);
  for (int attempt = 0; attempt < 10; ++attempt) {
    BlockTable waiting;
    EXPECT_EQ(admit(cache, waiting, sequence_tokens(24)), -1);
    cache.release(waiting);
    EXPECT_EQ(cache.num_available_blocks(), 4);
    check(cache, {&running, &waiting});
  }
  cache.release(running);
  EXPECT_EQ(cache.num_available_blocks(), 8);
  EXPECT_EQ(cache.stats().evictions, 0);
}

TEST(KvCacheManager, ForkSharesWholeBlocksAndCopiesThePartialOne) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(10);
  BlockTable parent, child;
  std::vector<BlockCopy> copies;
  admit(cache, parent, tokens);
  cache.mark_computed(parent, tokens, kSalt, 10);
  ASSERT_TRUE(cache.fork(parent, child, 9, copies));
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].source, parent.blocks[2]);
  EXPECT_EQ(copies[0].destination, child.blocks[2]);
  EXPECT_NE(parent.blocks[2], child.blocks[2]);
  EXPECT_EQ(child.blocks[0], parent.blocks[0]);
  EXPECT_EQ(child.blocks[1], parent.blocks[1]);
  EXPECT_EQ(child.num_hit_blocks, 0);
  EXPECT_EQ(cache.num_used_blocks(), 4);
  check(cache, {&parent, &child});
  cache.release(parent);
  check(cache, {&child});
  EXPECT_EQ(cache.num_used_blocks(), 3);
  cache.release(child);
  EXPECT_EQ(cache.num_used_blocks(), 0);
}

TEST(KvCacheManager, AForkAtABlockBoundaryCopiesNothingAndNeedsNoRoom) {
  KvCacheManager cache({.num_blocks = 2, .block_size = 4});
  BlockTable parent, child, other;
  std::vector<BlockCopy> copies;
  admit(cache, parent, sequence_tokens(8));
  EXPECT_TRUE(cache.fork(parent, child, 8, copies));
  EXPECT_TRUE(copies.empty());
  EXPECT_FALSE(cache.fork(parent, other, 7, copies));
  EXPECT_TRUE(copies.empty());
  EXPECT_TRUE(other.blocks.empty());
  check(cache, {&parent, &child, &other});
}

TEST(KvCacheManager, BothBranchesOfAForkArePublished) {
  KvCacheManager cache(kConfig);
  Tokens left = sequence_tokens(12);
  Tokens right = left;
  right[9] = 99;
  BlockTable parent, child;
  std::vector<BlockCopy> copies;
  admit(cache, parent, left);
  // Forked before anything is published: both offer the shared blocks.
  ASSERT_TRUE(cache.fork(parent, child, 9, copies));
  cache.mark_computed(parent, left, kSalt, 12);
  cache.mark_computed(child, right, kSalt, 12);
  check(cache, {&parent, &child});
  cache.release(parent);
  cache.release(child);
  left.push_back(1);
  right.push_back(1);
  EXPECT_EQ(run_once(cache, left), 12);
  EXPECT_EQ(run_once(cache, right), 12);
}

TEST(KvCacheManager, MisuseIsAnInternalError) {
  KvCacheManager cache(kConfig);
  const Tokens tokens = sequence_tokens(8);
  BlockTable table, child;
  std::vector<BlockCopy> copies;
  admit(cache, table, tokens);
  EXPECT_THROW(admit(cache, table, tokens), InternalError);
  EXPECT_THROW(cache.mark_computed(table, tokens, kSalt, 9), InternalError);
  EXPECT_THROW(cache.mark_computed(table, sequence_tokens(9), kSalt, 9), InternalError);
  EXPECT_THROW(cache.fork(table, child, 9, copies), InternalError);
  EXPECT_THROW(cache.fork(table, table, 4, copies), InternalError);
  check(cache, {&table});
}

TEST(KvCacheManager, CheckInvariantsSeesAMissingAndAForgedTable) {
  KvCacheManager cache(kConfig);
  BlockTable table;
  admit(cache, table, sequence_tokens(8));
  EXPECT_THROW(cache.check_invariants({}), InternalError);
  const BlockTable* both[] = {&table, &table};
  EXPECT_THROW(cache.check_invariants(both), InternalError);
  BlockTable forged = table;
  forged.blocks[0] = kNoBlock;
  const BlockTable* one[] = {&forged};
  EXPECT_THROW(cache.check_invariants(one), InternalError);
}

// KVA-01: thousands of requests that end in every way leave nothing behind.
TEST(KvCacheManager, NoBlocksAreLostOverThousandsOfRequests) {
  KvCacheManager cache({.num_blocks = 32, .block_size = 4});
  std::mt19937 random(7);
  const auto below = [&](int n) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(n));
  };
  std::vector<BlockCopy> copies;
  for (int request = 0; request < 5000; ++request) {
    Tokens tokens = sequence_tokens(1 + below(40), below(3) * 1000);
    BlockTable table;
    const int32_t cached = admit(cache, table, tokens);
    ASSERT_GE(cached, 0);
    const int kind = below(4);
    if (kind == 0) {  // aborted before, or in the middle of, its prefill
      const int32_t more = below(length(tokens) - cached + 1);
      cache.mark_computed(table, tokens, kSalt, cached + more);
    } else {
      cache.mark_computed(table, tokens, kSalt, length(tokens));
      const int32_t outputs = below(20);  // a stop anywhere
      for (int32_t i = 0; i < outputs; ++i) {
        tokens.push_back(below(3));
        if (!cache.grow(table, length(tokens))) break;
        cache.mark_computed(table, tokens, kSalt, length(tokens));
      }
    }
    if (kind == 3) {  // n = 4, finishing parent first
      BlockTable samples[3];
      const int32_t held = std::min(length(tokens), static_cast<int32_t>(table.blocks.size()) * 4);
      for (BlockTable& sample : samples) cache.fork(table, sample, held, copies);
      cache.release(table);
      for (BlockTable& sample : samples) cache.release(sample);
    }
    cache.release(table);
    ASSERT_EQ(cache.num_used_blocks(), 0);
    ASSERT_EQ(cache.num_available_blocks(), 32);
    if (request % 100 == 0) check(cache);
  }
  check(cache);
  EXPECT_GT(cache.stats().evictions, 0);
  EXPECT_GT(cache.stats().prefix_hits, 0);
}

}  // namespace
}  // namespace vllm_lite
