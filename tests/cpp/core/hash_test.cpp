#include "core/hash.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <set>
#include <vector>

namespace vllm_lite {
namespace {

using Tokens = std::vector<TokenId>;

TEST(Hash, KeepsItsValuesOnEveryPlatform) {
  // Computed from the definition with arbitrary-precision integers.
  EXPECT_EQ(hash_tokens(0, Tokens{}), 0x8c5a79f655611419ULL);
  EXPECT_EQ(hash_tokens(0, Tokens{1, 2, 3}), 0xff3d9756ced17ce9ULL);
  EXPECT_EQ(hash_tokens(7, Tokens{-1, 0, 2147483647, 5}), 0xf5ae61db28d9e621ULL);
  EXPECT_EQ(hash_salt({1, 2}), 0xda88bd617a48bc54ULL);
}

TEST(Hash, IsAConstantExpression) {
  constexpr std::array<TokenId, 2> tokens{1, 2};
  constexpr uint64_t hash = hash_tokens(0, tokens);
  EXPECT_EQ(hash, hash_tokens(0, Tokens{1, 2}));
}

TEST(Hash, DependsOnParentOrderAndLength) {
  std::set<uint64_t> hashes;
  size_t expected = 0;
  const auto add = [&](uint64_t hash) {
    hashes.insert(hash);
    ++expected;
  };
  add(hash_tokens(0, Tokens{1, 2}));
  add(hash_tokens(1, Tokens{1, 2}));
  add(hash_tokens(0, Tokens{2, 1}));
  add(hash_tokens(0, Tokens{1, 2, 0}));
  add(hash_tokens(0, Tokens{1, 2, 0, 0}));
  add(hash_tokens(0, Tokens{0, 1, 2}));
  add(hash_tokens(hash_tokens(0, Tokens{1}), Tokens{2}));
  add(hash_tokens(0, Tokens{}));
  add(hash_salt({0, 0}));
  add(hash_salt({1, 0}));
  add(hash_salt({0, 1}));
  EXPECT_EQ(hashes.size(), expected);
}

TEST(Hash, EachInputBitFlipsAboutHalfOfTheOutputBits) {
  const Tokens tokens{11, 22, 33, 44, 55, 66, 77};
  const uint64_t hash = hash_tokens(99, tokens);
  int total = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    for (int bit = 0; bit < 32; ++bit) {
      Tokens other = tokens;
      other[i] ^= static_cast<TokenId>(1u << bit);
      const int flipped = std::popcount(hash ^ hash_tokens(99, other));
      EXPECT_GE(flipped, 12) << "token " << i << " bit " << bit;
      EXPECT_LE(flipped, 52) << "token " << i << " bit " << bit;
      total += flipped;
    }
  }
  const double mean = total / (32.0 * static_cast<double>(tokens.size()));
  EXPECT_NEAR(mean, 32.0, 1.0);
}

TEST(Hash, SmallNeighbouringTokensSpreadEvenlyOverTheLowBits) {
  // 65536 pairs into 1024 places: 64 each, standard deviation 8.
  std::vector<int> counts(1024, 0);
  for (TokenId a = 0; a < 256; ++a) {
    for (TokenId b = 0; b < 256; ++b) ++counts[hash_tokens(0, Tokens{a, b}) & 1023];
  }
  double chi_squared = 0;
  for (int count : counts) chi_squared += (count - 64.0) * (count - 64.0) / 64.0;
  EXPECT_GT(chi_squared, 1023 - 6 * 45.2);
  EXPECT_LT(chi_squared, 1023 + 6 * 45.2);
}

}  // namespace
}  // namespace vllm_lite
