// StepResultView reads what is well formed and refuses everything else.

#include "scheduler/step_plan.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/check.h"
#include "scheduler/plan_view.h"

namespace vllm_lite {
namespace {

constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();

enum Field {
  kMagic,
  kNumWords,
  kStepLow,
  kStepHigh,
  kNumLogits,
  kMaxLogprobs,
  kError,
  kMessage,
  kNumScored,
  kMaxPromptLogprobs,
  kNumVectors,
  kVectorSize
};

// With two scored tokens that have one likeliest each, and a vector of three, if `scores`.
std::vector<int32_t> result_words(int32_t num_logits, int32_t max_logprobs,
                                  const std::string& message, bool scores = false) {
  std::vector<int32_t> words = {kResultMagic,
                                0,
                                7,
                                1,
                                num_logits,
                                max_logprobs,
                                message.empty() ? 0 : 1,
                                static_cast<int32_t>(message.size()),
                                scores ? 2 : 0,
                                scores ? 1 : 0,
                                scores ? 1 : 0,
                                scores ? 3 : 0};
  for (int32_t i = 0; i < num_logits; ++i) words.push_back(100 + i);
  if (max_logprobs >= 0) {
    for (int32_t i = 0; i < num_logits; ++i) {
      words.push_back(std::bit_cast<int32_t>(-0.5f * static_cast<float>(i)));
    }
    for (int32_t i = 0; i < num_logits; ++i) words.push_back(1 + i);
    for (int32_t i = 0; i < num_logits * max_logprobs; ++i) words.push_back(1000 + i);
    for (int32_t i = 0; i < num_logits * max_logprobs; ++i) {
      words.push_back(std::bit_cast<int32_t>(-1.0f * static_cast<float>(i)));
    }
  }
  if (scores) {
    for (const float logprob : {-1.5f, -2.5f}) words.push_back(std::bit_cast<int32_t>(logprob));
    words.insert(words.end(), {4, 0, 70, 71});  // ranks, top ids
    for (const float value : {-0.25f, -0.75f, 1.0f, 2.0f, 3.0f}) {
      words.push_back(std::bit_cast<int32_t>(value));
    }
  }
  const size_t at = words.size();
  words.resize(at + (message.size() + 3) / 4);
  if (!message.empty()) std::memcpy(words.data() + at, message.data(), message.size());
  words[kNumWords] = static_cast<int32_t>(words.size());
  return words;
}

TEST(StepResultView, ReadsEverySection) {
  const auto words = result_words(2, 3, "");
  const StepResultView view(words);
  EXPECT_EQ(view.step(), (uint64_t{1} << 32) + 7);
  EXPECT_EQ(view.token_ids()[1], 101);
  EXPECT_EQ(view.logprobs()[1], -0.5f);
  EXPECT_EQ(view.ranks()[1], 2);
  ASSERT_EQ(view.top_ids(1).size(), 3u);
  EXPECT_EQ(view.top_ids(1)[0], 1003);
  EXPECT_EQ(view.top_logprobs(1)[2], -5.0f);
  EXPECT_TRUE(view.message().empty());
  EXPECT_THROW(view.top_ids(2), InternalError);
  EXPECT_THROW(view.top_logprobs(-1), InternalError);
}

TEST(StepResultView, ReadsScoresAndVectorsBehindWhatWasSampled) {
  const auto words = result_words(2, 2, "", true);
  const StepResultView view(words);
  EXPECT_EQ(view.top_logprobs(1)[1], -3.0f);
  EXPECT_EQ(view.scored().width, 1u);
  EXPECT_EQ(view.scored().logprobs[1], -2.5f);
  EXPECT_EQ(view.scored().ranks[0], 4);
  EXPECT_EQ(view.scored().top_ids[1], 71);
  EXPECT_EQ(view.scored().top_logprobs[1], -0.75f);
  EXPECT_EQ(view.vector(0)[2], 3.0f);
  EXPECT_THROW(view.vector(1), InternalError);
}

TEST(StepResultView, SectionsThatNobodyAskedForAreEmpty) {
  const auto plain = result_words(2, -1, "");
  EXPECT_TRUE(StepResultView(plain).logprobs().empty());
  EXPECT_TRUE(StepResultView(plain).top_ids(0).empty());
  const auto chosen_only = result_words(2, 0, "");
  EXPECT_EQ(StepResultView(chosen_only).ranks().size(), 2u);
  EXPECT_TRUE(StepResultView(chosen_only).top_logprobs(1).empty());
}

TEST(StepResultView, ErrorCarriesItsMessage) {
  const auto words = result_words(0, -1, "out of memory");
  const StepResultView view(words);
  EXPECT_NE(view.header().error, 0);
  EXPECT_EQ(std::string(view.message().begin(), view.message().end()), "out of memory");
}

TEST(StepResultView, EveryPrefixOfAResultIsRefused) {
  const auto words = result_words(2, 2, "text", true);
  for (size_t size = 0; size < words.size(); ++size) {
    EXPECT_THROW(StepResultView({words.data(), size}), InternalError) << size;
  }
  EXPECT_NO_THROW(StepResultView{words});
}

TEST(StepResultView, WrongHeaderFieldsAreRefused) {
  const auto refuses = [](Field field, int32_t value) {
    auto words = result_words(2, 2, "text", true);
    words[field] = value;
    EXPECT_THROW(StepResultView{words}, InternalError) << field << " = " << value;
  };
  refuses(kMagic, kPlanMagic);
  for (int32_t value : {-1, 0, 5, kMaxInt, std::numeric_limits<int32_t>::min()}) {
    for (Field field : {kNumWords, kNumLogits, kMaxLogprobs, kMessage, kNumScored,
                        kMaxPromptLogprobs, kNumVectors, kVectorSize}) {
      refuses(field, value);
    }
  }
}

TEST(StepResultView, CountsWhoseProductsOverflowAreRefused) {
  for (int32_t n : {1, 2, 1 << 16, kMaxInt / 2, kMaxInt}) {
    for (int32_t top : {1 << 16, kMaxInt / 2, kMaxInt}) {
      auto words = result_words(0, -1, "");
      words[kNumLogits] = n;
      words[kMaxLogprobs] = top;
      EXPECT_THROW(StepResultView{words}, InternalError);
      words = result_words(0, -1, "");
      words[kNumScored] = n;
      words[kMaxPromptLogprobs] = top;
      EXPECT_THROW(StepResultView{words}, InternalError);
      words = result_words(0, -1, "");
      words[kNumVectors] = n;
      words[kVectorSize] = top;
      EXPECT_THROW(StepResultView{words}, InternalError);
    }
  }
}

TEST(PlanView, RandomWordsAreRefusedOrReadWithinBounds) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int32_t> small(-2, 4);
  for (int32_t round = 0; round < 20000; ++round) {
    std::vector<int32_t> words(60);
    for (int32_t& word : words) word = small(random);
    words[0] = kPlanMagic;
    words[1] = 60;
    try {
      const PlanView view(words);
      EXPECT_EQ(view.new_rows().size(), static_cast<size_t>(view.header().num_new_rows));
    } catch (const InternalError&) {
    }
  }
}

}  // namespace
}  // namespace vllm_lite
