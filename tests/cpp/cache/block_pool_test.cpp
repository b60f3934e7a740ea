#include "cache/block_pool.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "core/check.h"

namespace vllm_lite {
namespace {

TEST(BlockPool, HandsOutEveryBlockOnceAndThenNone) {
  BlockPool pool(4);
  std::set<BlockId> blocks;
  for (int i = 0; i < 4; ++i) blocks.insert(pool.allocate());
  EXPECT_EQ(blocks, (std::set<BlockId>{0, 1, 2, 3}));
  EXPECT_EQ(pool.num_available(), 0);
  EXPECT_THROW(pool.allocate(), InternalError);
  EXPECT_THROW(pool.evict(), InternalError);
  pool.check_invariants(std::vector<int32_t>{1, 1, 1, 1});
}

TEST(BlockPool, ABlockComesBackWithItsLastReference) {
  BlockPool pool(1);
  const BlockId block = pool.allocate();
  pool.ref(block);
  pool.unref(block, false);
  EXPECT_EQ(pool.state(block), BlockState::kInUse);
  EXPECT_EQ(pool.num_free(), 0);
  pool.unref(block, false);
  EXPECT_EQ(pool.state(block), BlockState::kFree);
  EXPECT_EQ(pool.allocate(), block);
}

TEST(BlockPool, KeptBlocksAreEvictedLeastRecentlyUsedFirst) {
  BlockPool pool(3);
  for (int i = 0; i < 3; ++i) pool.allocate();
  for (BlockId block : {2, 0, 1}) pool.unref(block, true);
  EXPECT_EQ(pool.num_cached(), 3);
  pool.touch(2);
  EXPECT_EQ(pool.evict(), 0);
  EXPECT_EQ(pool.evict(), 1);
  EXPECT_EQ(pool.evict(), 2);
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(BlockPool, AKeptBlockCanBePutJustBelowAnother) {
  BlockPool pool(4);
  for (int i = 0; i < 4; ++i) pool.allocate();
  pool.unref(0, true);
  pool.unref(1, true);
  pool.unref(2, true, 0);
  pool.unref(3, true, kNoBlock);
  for (BlockId expected : {2, 0, 1, 3}) EXPECT_EQ(pool.evict(), expected);
}

TEST(BlockPool, APlaceBelowABlockInUseIsTheMostRecentPlace) {
  BlockPool pool(3);
  for (int i = 0; i < 3; ++i) pool.allocate();
  pool.unref(0, true);
  pool.unref(1, true, 2);
  EXPECT_EQ(pool.evict(), 0);
  EXPECT_EQ(pool.evict(), 1);
}

TEST(BlockPool, ACachedBlockTakenAgainCannotBeEvicted) {
  BlockPool pool(2);
  for (int i = 0; i < 2; ++i) pool.allocate();
  pool.unref(0, true);
  pool.unref(1, true);
  pool.ref(0);
  EXPECT_EQ(pool.num_available(), 1);
  EXPECT_EQ(pool.evict(), 1);
  EXPECT_EQ(pool.num_cached(), 0);
  pool.check_invariants(std::vector<int32_t>{1, 0});
}

TEST(BlockPool, GenerationChangesExactlyWhenContentsBecomeWorthless) {
  BlockPool pool(2);
  std::set<uint64_t> seen{0, pool.generation(0), pool.generation(1)};
  EXPECT_EQ(seen.size(), 3u);
  const BlockId block = pool.allocate();
  const uint64_t first = pool.generation(block);
  pool.ref(block);
  pool.unref(block, false);
  pool.unref(block, true);
  pool.touch(block);
  pool.ref(block);
  pool.unref(block, true);
  EXPECT_EQ(pool.generation(block), first);
  pool.evict();
  EXPECT_TRUE(seen.insert(pool.generation(block)).second);
  pool.allocate();
  pool.unref(block, false);
  EXPECT_TRUE(seen.insert(pool.generation(block)).second);
}

TEST(BlockPool, WrongStatesAreErrors) {
  BlockPool pool(2);
  EXPECT_THROW(pool.ref(0), InternalError);
  EXPECT_THROW(pool.unref(0, false), InternalError);
  EXPECT_THROW(pool.touch(0), InternalError);
  pool.allocate();
  EXPECT_NO_THROW(pool.touch(0));
  EXPECT_THROW(pool.check_invariants(std::vector<int32_t>{0, 0}), InternalError);
  EXPECT_THROW(pool.check_invariants(std::vector<int32_t>{2, 0}), InternalError);
  EXPECT_NO_THROW(pool.check_invariants(std::vector<int32_t>{1, 0}));
}

}  // namespace
}  // namespace vllm_lite
