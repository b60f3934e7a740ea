#include "engine/beam_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>

namespace vllm_lite {
namespace {

using Tokens = std::vector<TokenId>;

// A model over a few tokens: each sequence has its own next log-probabilities, drawn at random.
class Model {
 public:
  Model(int32_t vocabulary, uint32_t seed) : vocabulary_(vocabulary), seed_(seed) {}

  const std::vector<float>& after(const Tokens& tokens) {
    auto [found, is_new] = known_.try_emplace(tokens);
    if (is_new) {
      uint32_t hash = seed_;
      for (const TokenId token : tokens) hash = hash * 31 + static_cast<uint32_t>(token) + 1;
      std::mt19937 random(hash);
      std::vector<double> weights(static_cast<size_t>(vocabulary_));
      double sum = 0;
      for (double& weight : weights) {
        weight = std::exp(std::normal_distribution<>(0, 2)(random));
        sum += weight;
      }
      for (const double weight : weights) {
        found->second.push_back(static_cast<float>(std::log(weight / sum)));
      }
    }
    return found->second;
  }

  // The `count` likeliest tokens, as a worker gives them.
  std::pair<Tokens, std::vector<float>> likeliest(const Tokens& tokens, size_t count) {
    const std::vector<float>& all = after(tokens);
    Tokens ids(all.size());
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<TokenId>(i);
    std::stable_sort(ids.begin(), ids.end(), [&](TokenId a, TokenId b) {
      return all[static_cast<size_t>(a)] > all[static_cast<size_t>(b)];
    });
    ids.resize(std::min(count, ids.size()));
    std::vector<float> logprobs;
    for (const TokenId id : ids) logprobs.push_back(all[static_cast<size_t>(id)]);
    ids.resize(count, -1);  // padding
    logprobs.resize(count, -std::numeric_limits<float>::infinity());
    return {ids, logprobs};
  }

  int32_t vocabulary() const { return vocabulary_; }

 private:
  int32_t vocabulary_;
  uint32_t seed_;
  std::map<Tokens, std::vector<float>> known_;
};

struct Result {
  Tokens tokens;
  double score;
  bool operator==(const Result&) const = default;
};

struct Search {
  BeamSearchParams params;
  int32_t max_tokens;
  Tokens stop_ids;

  bool is_stop(TokenId token) const {
    return std::count(stop_ids.begin(), stop_ids.end(), token) > 0;
  }
  double score(double sum, size_t length) const {
    return sum / std::pow(static_cast<double>(length), params.length_penalty);
  }
};

std::vector<Result> run(const Search& search, Model& model, int32_t* num_steps = nullptr) {
  BeamSearch beams(search.params, search.max_tokens, search.stop_ids);
  std::vector<Tokens> running = {{}};
  const size_t count = static_cast<size_t>(search.params.width) + search.stop_ids.size();
  while (!beams.done()) {
    std::vector<std::pair<Tokens, std::vector<float>>> lists;
    for (const Tokens& tokens : running) lists.push_back(model.likeliest(tokens, count));
    std::vector<BeamSearch::Continuations> after;
    for (const auto& [ids, logprobs] : lists) after.push_back({ids, logprobs});
    beams.advance(after);
    if (num_steps != nullptr) ++*num_steps;
    std::vector<Tokens> next;
    for (const BeamSearch::Beam& beam : beams.beams()) {
      next.push_back(running[static_cast<size_t>(beam.parent)]);
      next.back().push_back(beam.token);
    }
    running = std::move(next);
  }
  std::vector<Result> results;
  std::vector<BeamSearch::Token> tokens;
  for (int32_t i = 0; i < beams.num_hypotheses(); ++i) {
    beams.tokens(i, tokens);
    Result& result = results.emplace_back();
    double sum = 0;
    for (const BeamSearch::Token& token : tokens) {
      EXPECT_EQ(token.logprob, model.after(result.tokens)[static_cast<size_t>(token.id)]);
      const auto list = model.likeliest(result.tokens, count);
      EXPECT_EQ(list.first[static_cast<size_t>(token.rank) - 1], token.id);
      result.tokens.push_back(token.id);
      sum += double{token.logprob};
    }
    result.score = beams.score(i);
    EXPECT_EQ(result.score, search.score(sum, tokens.size()));
    EXPECT_EQ(beams.ends_with_stop(i), search.is_stop(result.tokens.back()));
  }
  return results;
}

// The same search over whole vocabularies and whole sequences, written down as transformers does
// it: every slot always full, unfinished and finished ones told apart by huge negative scores.
// `exhausts`: no end before max_tokens.
std::vector<Result> reference(const Search& search, Model& model, bool exhausts = false) {
  constexpr double kNone = -1e9;
  const auto width = static_cast<size_t>(search.params.width);
  const double penalty = search.params.length_penalty;
  struct Slot {
    Tokens tokens;
    double score = kNone;
    bool finished = false;
  };
  const auto best = [](std::vector<Slot> slots, size_t count) {
    std::stable_sort(slots.begin(), slots.end(),
                     [](const Slot& a, const Slot& b) { return a.score > b.score; });
    slots.resize(std::min(count, slots.size()));
    return slots;
  };
  std::vector<Slot> running(1, Slot{{}, 0.0, false});
  std::vector<Slot> finished(width);
  for (int32_t length = 1;; ++length) {
    std::vector<Slot> candidates;
    for (const Slot& slot : running) {
      const std::vector<float>& after = model.after(slot.tokens);
      // In the order that equal sums have.
      for (const TokenId token : model.likeliest(slot.tokens, after.size()).first) {
        Slot& candidate = candidates.emplace_back(slot);
        candidate.tokens.push_back(token);
        candidate.score += double{after[static_cast<size_t>(token)]};
        candidate.finished = length == search.max_tokens || search.is_stop(token);
      }
    }
    candidates = best(candidates, std::max<size_t>(2, 1 + search.stop_ids.size()) * width);
    std::vector<Slot> open = candidates;
    std::vector<Slot> merged = finished;
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (open[i].finished) open[i].score += kNone;
      Slot ended = candidates[i];
      ended.score = search.score(ended.score, static_cast<size_t>(length));
      if (i < width && ended.finished) merged.push_back(ended);
    }
    running = best(open, width);
    std::erase_if(running, [](const Slot& slot) { return slot.finished; });
    finished = best(merged, width);
    if (running.empty() || length == search.max_tokens) break;
    const bool full = finished.back().finished;
    if (exhausts || !full) continue;
    if (search.params.early_stopping == EarlyStopping::kYes) break;
    const int32_t hypothetical =
        search.params.early_stopping == EarlyStopping::kNever && penalty > 0 ? search.max_tokens
                                                                             : length;
    const double bound = search.score(running[0].score, static_cast<size_t>(hypothetical));
    if (bound <= finished.back().score) break;
  }
  std::vector<Result> results;
  for (const Slot& slot : finished) {
    if (slot.finished) results.push_back({slot.tokens, slot.score});
  }
  return results;
}

constexpr double kPenalties[] = {-1, 0, 0.6, 1, 2};
constexpr EarlyStopping kModes[] = {EarlyStopping::kNo, EarlyStopping::kYes, EarlyStopping::kNever};

TEST(BeamSearch, IsTheReferenceForEveryWidthPenaltyAndMode) {
  int32_t num_early = 0;
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    for (int32_t width = 1; width <= 8; ++width) {
      for (const double penalty : kPenalties) {
        for (const EarlyStopping mode : kModes) {
          Model model(12, seed);
          Search search{{width, penalty, mode}, static_cast<int32_t>(1 + seed % 7), {}};
          for (uint32_t i = 0; i < seed % 4; ++i) {
            search.stop_ids.push_back(static_cast<TokenId>(3 * i));
          }
          SCOPED_TRACE("seed " + std::to_string(seed) + " width " + std::to_string(width));
          int32_t num_steps = 0;
          ASSERT_EQ(run(search, model, &num_steps), reference(search, model));
          num_early += num_steps < search.max_tokens;
        }
      }
    }
  }
  EXPECT_GT(num_early, 50);
}

// BEM-06: a bound that was wrong for some signs of the penalty ended the search before better
// beams.
TEST(BeamSearch, NeverEndsBeforeABeamThatWouldStillBeAmongTheBest) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    for (const double penalty : {-2.0, -1.0, 0.0, 0.6, 1.0, 3.0}) {
      Model model(8, seed);
      const Search search{{3, penalty, EarlyStopping::kNever}, 8, {0, 1}};
      ASSERT_EQ(run(search, model), reference(search, model, true)) << seed << " " << penalty;
    }
  }
}

// All sequences that end with a stop token or have `max_tokens`.
void enumerate(const Search& search, Model& model, const Tokens& tokens, double sum,
               std::vector<Result>& out) {
  for (TokenId token = 0; token < model.vocabulary(); ++token) {
    Tokens next = tokens;
    next.push_back(token);
    const double next_sum = sum + double{model.after(tokens)[static_cast<size_t>(token)]};
    if (search.is_stop(token) || static_cast<int32_t>(next.size()) == search.max_tokens) {
      out.push_back({next, search.score(next_sum, next.size())});
    } else {
      enumerate(search, model, next, next_sum, out);
    }
  }
}

TEST(BeamSearch, AtFullWidthFindsTheBestOfAllSequences) {
  constexpr int32_t kWidth = 7 * 7 * 7 * 7;  // all that five tokens of 8 can begin with
  for (const double penalty : {-1.0, 0.0, 0.6, 2.0}) {
    for (const EarlyStopping mode : kModes) {
      Model model(8, 5);
      const Search search{{kWidth, penalty, mode}, 5, {0}};
      std::vector<Result> all;
      enumerate(search, model, {}, 0, all);
      std::stable_sort(all.begin(), all.end(),
                       [](const Result& a, const Result& b) { return a.score > b.score; });
      const std::vector<Result> found = run(search, model);
      ASSERT_EQ(found.size(), static_cast<size_t>(kWidth));
      for (size_t i = 0; i < 100; ++i) EXPECT_EQ(found[i], all[i]);
    }
  }
}

TEST(BeamSearch, ALargerPenaltyPrefersLongerSequences) {
  // Stops at once with log-probability -1, or goes on for three tokens with -0.5 each.
  const auto best_length = [](double penalty) {
    BeamSearch search({2, penalty, EarlyStopping::kNever}, 3, {0});
    const Tokens ids = {1, 0};
    const std::vector<float> logprobs = {-0.5f, -1.0f};
    while (!search.done()) {
      search.advance(
          std::vector<BeamSearch::Continuations>(search.beams().size(), {ids, logprobs}));
    }
    std::vector<BeamSearch::Token> tokens;
    search.tokens(0, tokens);
    return tokens.size();
  };
  EXPECT_EQ(best_length(0.1), 1u);
  EXPECT_EQ(best_length(1), 3u);
  EXPECT_EQ(best_length(3), 3u);
}

TEST(BeamSearch, GivesFewerThanItsWidthIfSoManySequencesDoNotExist) {
  Model model(3, 1);
  EXPECT_EQ(run({{5, 1, EarlyStopping::kNo}, 1, {}}, model).size(), 3u);
  EXPECT_EQ(run({{5, 1, EarlyStopping::kNo}, 4, {0, 1, 2}}, model).size(), 3u);
}

TEST(BeamSearch, EqualSumsAreInOrderOfBeamAndPlace) {
  BeamSearch search({2, 1, EarlyStopping::kNo}, 3, {});
  const Tokens ids = {5, 7, 6};
  const std::vector<float> logprobs = {-1, -1, -1};
  const BeamSearch::Continuations list{ids, logprobs};
  search.advance({{list}});
  search.advance(std::vector{list, list});
  ASSERT_EQ(search.beams().size(), 2u);
  EXPECT_EQ(search.beams()[0].parent, 0);
  EXPECT_EQ(search.beams()[1].parent, 0);
  EXPECT_EQ(search.beams()[1].token, 7);
}

TEST(BeamSearch, RestartForgetsEverything) {
  Model model(9, 3);
  const Search search{{3, 1, EarlyStopping::kNo}, 4, {2}};
  BeamSearch beams(search.params, 4, search.stop_ids);
  const auto [ids, logprobs] = model.likeliest({}, 4);
  beams.advance({{{ids, logprobs}}});
  beams.restart();
  EXPECT_EQ(beams.num_hypotheses(), 0);
  ASSERT_EQ(beams.beams().size(), 1u);
  beams.advance({{{ids, logprobs}}});
  EXPECT_EQ(beams.beams().size(), 3u);
}

}  // namespace
}  // namespace vllm_lite
