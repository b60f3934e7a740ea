#include "cache/prefix_index.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/check.h"

namespace vllm_lite {
namespace {

using Tokens = std::vector<TokenId>;
constexpr CacheSalt kSalt{};
constexpr CacheSalt kOtherSalt{0, 1};

class PrefixIndexTest : public testing::TestWithParam<int32_t> {
 protected:
  PrefixIndex index{8, 2, GetParam()};
  uint64_t next_generation = 100;
  void offer(BlockId block, const PrefixLink& parent, const Tokens& tokens,
             const CacheSalt& salt = kSalt) {
    index.offer(block, next_generation++, parent, tokens, salt);
    index.check_invariants();
  }
  PrefixLink announce(BlockId block, const PrefixLink& parent, const Tokens& tokens) {
    const PrefixLink after = index.announce(block, next_generation++, parent, tokens, kSalt);
    index.check_invariants();
    return after;
  }
};

INSTANTIATE_TEST_SUITE_P(HashBits, PrefixIndexTest, testing::Values(64, 4, 0));

TEST_P(PrefixIndexTest, FindsABlockByTokensInItsPlaceAlone) {
  const PrefixLink root = index.root(kSalt);
  offer(0, root, {1, 2});
  offer(1, index.link(0), {3, 4});
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), 0);
  EXPECT_EQ(index.find(index.link(0), Tokens{3, 4}, kSalt), 1);
  EXPECT_EQ(index.find(root, Tokens{3, 4}, kSalt), kNoBlock);
  EXPECT_EQ(index.find(index.link(1), Tokens{3, 4}, kSalt), kNoBlock);
  EXPECT_EQ(index.find(root, Tokens{2, 1}, kSalt), kNoBlock);
}

TEST_P(PrefixIndexTest, SaltsDoNotMix) {
  offer(0, index.root(kSalt), {1, 2});
  EXPECT_EQ(index.find(index.root(kOtherSalt), Tokens{1, 2}, kOtherSalt), kNoBlock);
  offer(1, index.root(kOtherSalt), {1, 2}, kOtherSalt);
  EXPECT_EQ(index.find(index.root(kSalt), Tokens{1, 2}, kSalt), 0);
  EXPECT_EQ(index.find(index.root(kOtherSalt), Tokens{1, 2}, kOtherSalt), 1);
}

TEST_P(PrefixIndexTest, AChildIsNotFoundThroughANewParentInTheOldOnesBlock) {
  const PrefixLink root = index.root(kSalt);
  offer(0, root, {1, 2});
  offer(1, index.link(0), {3, 4});
  index.forget(0);
  EXPECT_EQ(index.parent_of(1), kNoBlock);
  offer(0, root, {5, 6});
  EXPECT_EQ(index.find(index.link(0), Tokens{3, 4}, kSalt), kNoBlock);
  // Not even when the very same contents are computed anew: nobody can tell that they are the same.
  index.forget(0);
  offer(0, root, {1, 2});
  EXPECT_EQ(index.find(index.link(0), Tokens{3, 4}, kSalt), kNoBlock);
  EXPECT_EQ(index.parent_of(1), kNoBlock);
}

TEST_P(PrefixIndexTest, AnEqualBlockKeepsTheFirstAndItsChildrenHangBelowTheFirst) {
  const PrefixLink root = index.root(kSalt);
  offer(0, root, {1, 2});
  offer(1, root, {1, 2});
  EXPECT_TRUE(index.findable(0));
  EXPECT_FALSE(index.findable(1));
  offer(2, index.link(1), {3, 4});
  EXPECT_EQ(index.find(index.link(0), Tokens{3, 4}, kSalt), 2);
  EXPECT_EQ(index.parent_of(2), 0);
  EXPECT_EQ(index.settle(1), 0);
}

TEST_P(PrefixIndexTest, ATwinTakesThePlaceOfItsEvictedEqualAndTheChildrenAreFoundAgain) {
  const PrefixLink root = index.root(kSalt);
  offer(0, root, {1, 2});
  offer(1, root, {1, 2});
  offer(2, index.link(1), {3, 4});
  index.forget(0);
  offer(3, index.link(1), {5, 6});
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), kNoBlock);
  EXPECT_EQ(index.settle(1), 1);
  index.check_invariants();
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), 1);
  EXPECT_EQ(index.find(index.link(1), Tokens{3, 4}, kSalt), 2);
  EXPECT_EQ(index.find(index.link(1), Tokens{5, 6}, kSalt), 3);
}

TEST_P(PrefixIndexTest, AfterABlockWithoutANameNothingIsFound) {
  offer(1, index.link(0), {3, 4});
  EXPECT_FALSE(index.findable(1));
  EXPECT_EQ(index.settle(1), kNoBlock);
  EXPECT_EQ(index.find(index.link(0), Tokens{3, 4}, kSalt), kNoBlock);
}

TEST_P(PrefixIndexTest, ABarredBlockCannotBeOfferedUntilItIsForgotten) {
  const PrefixLink root = index.root(kSalt);
  offer(0, root, {1, 2});
  index.bar(0);
  offer(0, root, {1, 2});
  EXPECT_TRUE(index.barred(0));
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), kNoBlock);
  EXPECT_EQ(index.settle(0), kNoBlock);
  index.forget(0);
  offer(0, root, {1, 2});
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), 0);
}

TEST_P(PrefixIndexTest, OfferingABlockAgainChangesNothing) {
  const PrefixLink root = index.root(kSalt);
  offer(0, root, {1, 2});
  const ContentId content = index.link(0).content;
  offer(0, root, {1, 2});
  EXPECT_EQ(index.link(0).content, content);
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), 0);
}

TEST_P(PrefixIndexTest, AnAnnouncedChainIsComingUntilItIsOfferedBlockByBlock) {
  const PrefixLink root = index.root(kSalt);
  const PrefixLink after = announce(0, root, {1, 2});
  announce(1, after, {3, 4});
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), 0);
  EXPECT_EQ(index.find(after, Tokens{3, 4}, kSalt), 1);
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kOtherSalt), kNoBlock);
  EXPECT_EQ(index.find(root, Tokens{1, 3}, kSalt), kNoBlock);
  EXPECT_TRUE(index.coming(0) && index.coming(1));
  offer(0, root, {1, 2});
  EXPECT_TRUE(index.findable(0) && index.coming(1));
  offer(1, index.link(0), {3, 4});
  EXPECT_TRUE(index.findable(1));
  EXPECT_EQ(index.parent_of(1), 0);
}

TEST_P(PrefixIndexTest, WhatIsOnlyComingIsGoneWithItsBlock) {
  const PrefixLink root = index.root(kSalt);
  announce(0, root, {1, 2});
  EXPECT_EQ(index.settle(0), kNoBlock);
  index.forget(0);
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), kNoBlock);
  announce(1, root, {1, 2});
  index.bar(1);
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), kNoBlock);
  EXPECT_EQ(announce(1, root, {1, 2}).content, kNoContent);
}

TEST_P(PrefixIndexTest, TheSecondToAnnounceTheSameGoesOnAfterTheFirst) {
  const PrefixLink root = index.root(kSalt);
  announce(0, root, {1, 2});
  const PrefixLink after = announce(1, root, {1, 2});
  EXPECT_FALSE(index.coming(1));
  EXPECT_EQ(after.content, index.link(0).content);
  announce(2, after, {3, 4});
  EXPECT_EQ(index.find(index.link(0), Tokens{3, 4}, kSalt), 2);
  // It is also the first that has them.
  offer(1, root, {1, 2});
  EXPECT_TRUE(index.findable(1));
  EXPECT_FALSE(index.coming(0));
  EXPECT_EQ(index.find(index.link(1), Tokens{3, 4}, kSalt), 2);
  offer(0, root, {1, 2});
  EXPECT_EQ(index.settle(0), 1);
}

TEST_P(PrefixIndexTest, ABlockAnnouncedAfterSomebodyWhoGaveUpIsFoundAfterItsOwnParent) {
  const PrefixLink root = index.root(kSalt);
  announce(0, root, {1, 2});
  announce(2, announce(1, root, {1, 2}), {3, 4});
  index.forget(0);
  offer(1, root, {1, 2});
  EXPECT_EQ(index.find(index.link(1), Tokens{3, 4}, kSalt), kNoBlock);
  offer(2, index.link(1), {3, 4});
  EXPECT_EQ(index.find(index.link(1), Tokens{3, 4}, kSalt), 2);
}

TEST_P(PrefixIndexTest, ATwinTakesThePlaceOfAnEqualBlockThatIsOnlyComing) {
  const PrefixLink root = index.root(kSalt);
  offer(0, root, {1, 2});
  offer(1, root, {1, 2});
  index.forget(0);
  announce(2, root, {1, 2});
  EXPECT_EQ(index.settle(1), 1);
  index.check_invariants();
  EXPECT_EQ(index.find(root, Tokens{1, 2}, kSalt), 1);
  EXPECT_FALSE(index.coming(2));
}

TEST_P(PrefixIndexTest, TokensMustBeAWholeBlock) {
  EXPECT_THROW(index.find(index.root(kSalt), Tokens{1}, kSalt), InternalError);
  EXPECT_THROW(offer(0, index.root(kSalt), {1, 2, 3}), InternalError);
}

}  // namespace
}  // namespace vllm_lite
