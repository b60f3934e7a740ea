// Drafts from n-grams, against a search that is slow and obvious.
#include "engine/ngram_proposer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "core/check.h"

namespace vllm_lite {
namespace {

using Tokens = std::vector<TokenId>;

Tokens propose(const Tokens& tokens, int32_t min, int32_t max, size_t num_drafts = 4) {
  Tokens drafts = {99};  // of the step before
  propose_ngram({.prompt_lookup_min = min, .prompt_lookup_max = max}, tokens, num_drafts, drafts);
  return drafts;
}

// From the longest n-gram to the shortest, from the end to the beginning.
Tokens reference(const Tokens& tokens, int32_t min, int32_t max, size_t num_drafts) {
  const auto size = static_cast<int32_t>(tokens.size());
  for (int32_t length = max; length >= min; --length) {
    for (int32_t end = size - 1; end >= length; --end) {
      if (!std::equal(tokens.begin() + end - length, tokens.begin() + end, tokens.end() - length)) {
        continue;
      }
      Tokens all = tokens;
      while (all.size() < tokens.size() + num_drafts) {
        all.push_back(all[static_cast<size_t>(end) + all.size() - tokens.size()]);
      }
      return {all.begin() + size, all.end()};
    }
  }
  return {};
}

TEST(NgramProposer, WhatFollowedTheLongestNgramComesFirst) {
  // "2 3" was followed by 4; later 3 alone by 5.
  EXPECT_EQ(propose({1, 2, 3, 4, 8, 3, 5, 2, 3}, 1, 3), (Tokens{4, 8, 3, 5}));
}

TEST(NgramProposer, OfEqualNgramsTheLatestCounts) {
  EXPECT_EQ(propose({2, 3, 4, 2, 3, 5, 9, 2, 3}, 1, 3, 2), (Tokens{5, 9}));
  // Longer than the longest looked for they are equal, too.
  EXPECT_EQ(propose({1, 2, 3, 4, 6, 2, 3, 5, 1, 2, 3}, 1, 2, 1), (Tokens{5}));
  EXPECT_EQ(propose({1, 2, 3, 4, 6, 2, 3, 5, 1, 2, 3}, 1, 3, 1), (Tokens{4}));
}

TEST(NgramProposer, NgramsBelowTheShortestGiveNothing) {
  EXPECT_EQ(propose({7, 2, 3, 4, 9, 2, 3}, 3, 4), Tokens{});
  EXPECT_EQ(propose({7, 2, 3, 4, 9, 2, 3}, 2, 4, 1), Tokens{4});
  EXPECT_EQ(propose({1, 2, 3, 4}, 1, 4), Tokens{});
}

TEST(NgramProposer, ARepetitionGoesOnBeyondTheEnd) {
  EXPECT_EQ(propose({9, 2, 3, 4, 2, 3, 4}, 1, 3, 8), (Tokens{2, 3, 4, 2, 3, 4, 2, 3}));
  EXPECT_EQ(propose({5, 5}, 1, 4, 3), (Tokens{5, 5, 5}));
}

TEST(NgramProposer, TooFewTokensGiveNothing) {
  for (int32_t size = 0; size <= 3; ++size) {
    EXPECT_EQ(propose(Tokens(static_cast<size_t>(size), 5), 3, 5), Tokens{}) << size;
  }
  EXPECT_EQ(propose(Tokens(4, 5), 3, 5, 2), (Tokens{5, 5}));
  EXPECT_EQ(propose({}, 1, 1), Tokens{});
  EXPECT_EQ(propose({5}, 1, 1), Tokens{});
}

TEST(NgramProposer, RandomTokensOfSmallAlphabetsGiveWhatTheSlowSearchGives) {
  std::mt19937 random(1);
  const auto pick = [&random](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  int32_t num_found = 0;
  constexpr int32_t kRounds = 30000;
  for (int32_t round = 0; round < kRounds; ++round) {
    Tokens tokens(static_cast<size_t>(pick(0, 40)));
    const int32_t alphabet = pick(1, 5);
    for (TokenId& token : tokens) token = pick(1, alphabet);
    const int32_t min = pick(1, 4);
    const int32_t max = pick(min, 8);
    const auto num_drafts = static_cast<size_t>(pick(0, 17));
    const Tokens drafts = propose(tokens, min, max, num_drafts);
    ASSERT_EQ(drafts, reference(tokens, min, max, num_drafts)) << "round " << round;
    num_found += !drafts.empty();
  }
  EXPECT_GT(num_found, kRounds / 3);
  EXPECT_LT(num_found, kRounds * 9 / 10);
}

TEST(NgramProposer, LengthsOutOfRangeAreRefused) {
  for (const NgramConfig& config : {NgramConfig{0, 3}, NgramConfig{-1, 3}, NgramConfig{4, 3},
                                    NgramConfig{1, kMaxPromptLookup + 1}, NgramConfig{0, 0}}) {
    try {
      check_ngram(config);
      FAIL() << config.prompt_lookup_min << " to " << config.prompt_lookup_max;
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("prompt_lookup_min is " + std::to_string(config.prompt_lookup_min)),
                std::string::npos)
          << message;
    }
  }
  EXPECT_NO_THROW(check_ngram({1, kMaxPromptLookup}));
  EXPECT_NO_THROW(check_ngram({kMaxPromptLookup, kMaxPromptLookup}));
}

}  // namespace
}  // namespace vllm_lite
