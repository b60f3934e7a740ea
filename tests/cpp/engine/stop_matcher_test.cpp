#include "engine/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>

#include "core/check.h"
#include "engine/detokenizer.h"
#include "text_reference.h"

namespace vllm_lite {
namespace {

using testing::cut;
using testing::make_table;

using Strings = std::vector<std::string>;

struct Match {
  int32_t stop = -1;
  size_t begin = 0, end = 0;
};

// The match that ends first; of several that end there, the one that begins first.
Match find_first(const Strings& stops, const std::string& text) {
  Match best;
  for (size_t i = 0; i < stops.size(); ++i) {
    const size_t begin = text.find(stops[i]);
    if (begin == std::string::npos) continue;
    const size_t end = begin + stops[i].size();
    if (best.stop < 0 || end < best.end || (end == best.end && begin < best.begin)) {
      best = {static_cast<int32_t>(i), begin, end};
    }
  }
  return best;
}

// Length of the longest suffix of `text` that is a proper prefix of a stop string.
size_t held_back(const Strings& stops, const std::string& text) {
  size_t longest = 0;
  for (const std::string& stop : stops) {
    for (size_t n = 1; n < stop.size() && n <= text.size(); ++n) {
      if (text.substr(text.size() - n) == stop.substr(0, n)) longest = std::max(longest, n);
    }
  }
  return longest;
}

// Feeds the pieces and compares with the whole text after each of them.
void check_pieces(const std::shared_ptr<const StopAutomaton>& automaton, const Strings& pieces,
                  bool include) {
  const Strings& stops = automaton->stops();
  StopMatcher matcher(automaton, include);
  std::string seen, out;
  for (const std::string& piece : pieces) {
    seen += piece;
    const Match want = find_first(stops, seen);
    ASSERT_EQ(matcher.would_match(piece), want.stop);
    ASSERT_EQ(matcher.append(piece, out), want.stop);
    if (want.stop >= 0) {
      ASSERT_EQ(out, seen.substr(0, include ? want.end : want.begin));
      matcher.finish(out);
      ASSERT_EQ(out, seen.substr(0, include ? want.end : want.begin));
      return;
    }
    ASSERT_EQ(out, seen.substr(0, seen.size() - held_back(stops, seen)));
  }
  matcher.finish(out);
  ASSERT_EQ(out, seen);
}

std::string random_string(std::mt19937& random, size_t length, const std::string& alphabet) {
  std::string text;
  for (size_t i = 0; i < length; ++i) text += alphabet[random() % alphabet.size()];
  return text;
}

// STP-01
TEST(StopMatcher, EveryCutOfShortTextsMatchesTheSearchOfTheWhole) {
  std::mt19937 random(3);
  for (int round = 0; round < 30; ++round) {
    Strings stops(random() % 4);
    for (std::string& stop : stops) stop = random_string(random, random() % 4 + 1, "ab");
    const auto automaton = std::make_shared<const StopAutomaton>(stops);
    SCOPED_TRACE("round " + std::to_string(round));
    constexpr uint32_t kLength = 6;
    for (uint32_t code = 0; code < 1U << kLength; ++code) {
      std::string text;
      for (uint32_t i = 0; i < kLength; ++i) text += code >> i & 1 ? 'b' : 'a';
      for (uint32_t cuts = 0; cuts < 1U << (kLength - 1); ++cuts) {
        ASSERT_NO_FATAL_FAILURE(check_pieces(automaton, cut(text, cuts), cuts & 1)) << text;
      }
    }
  }
}

TEST(StopMatcher, RandomCutsOfLongTextsMatchTheSearchOfTheWhole) {
  std::mt19937 random(4);
  for (int round = 0; round < 400; ++round) {
    const std::string alphabet = round % 2 == 0 ? "abc" : "ab\xC3\xA9\xF0\xFF";
    Strings stops(random() % 6 + 1);
    for (std::string& stop : stops) stop = random_string(random, random() % 9 + 1, alphabet);
    const auto automaton = std::make_shared<const StopAutomaton>(stops);
    const std::string text = random_string(random, random() % 300, alphabet + "z");
    Strings pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t length = random() % 6;
      pieces.push_back(text.substr(at, length));
      at += length;
    }
    SCOPED_TRACE("round " + std::to_string(round));
    ASSERT_NO_FATAL_FAILURE(check_pieces(automaton, pieces, random() % 2 == 0));
  }
}

// Stop strings with every byte value in them: as many columns as there can be.
TEST(StopMatcher, ManyLongStopStringsOverAllBytes) {
  std::mt19937 random(5);
  std::string all_bytes;
  for (int i = 0; i < 256; ++i) all_bytes += static_cast<char>(i);
  Strings stops = {all_bytes};
  for (int i = 0; i < 30; ++i) stops.push_back(random_string(random, 60, all_bytes));
  const auto automaton = std::make_shared<const StopAutomaton>(stops);
  for (size_t i = 0; i < stops.size(); ++i) {
    const Strings pieces = {"x" + stops[(i + 1) % stops.size()].substr(0, 50),
                            stops[i].substr(0, 17), stops[i].substr(17), "rest"};
    ASSERT_NO_FATAL_FAILURE(check_pieces(automaton, pieces, false)) << i;
  }
}

Strings run(const Strings& stops, const Strings& pieces, bool include, int32_t want_stop) {
  StopMatcher matcher(std::make_shared<const StopAutomaton>(stops), include);
  Strings out;
  for (const std::string& piece : pieces) {
    out.emplace_back();
    const int32_t stop = matcher.append(piece, out.back());
    if (stop < 0) continue;
    EXPECT_EQ(stop, want_stop);
    return out;
  }
  EXPECT_EQ(want_stop, -1);
  out.emplace_back();
  matcher.finish(out.back());
  return out;
}

TEST(StopMatcher, TheMatchThatEndsFirstWinsThenTheOneThatBeginsFirst) {
  EXPECT_EQ(run({"abcd", "bc"}, {"xabcd"}, false, 1), (Strings{"xa"}));
  EXPECT_EQ(run({"bc", "abc"}, {"xabcd"}, false, 1), (Strings{"x"}));
  EXPECT_EQ(run({"abc", "bc", "abc"}, {"xab", "cd"}, true, 0), (Strings{"x", "abc"}));
}

TEST(StopMatcher, LetsGoOfWhatTurnsOutHarmless) {
  EXPECT_EQ(run({"abac"}, {"xab", "a", "b", "a", "d"}, false, -1),
            (Strings{"x", "", "ab", "", "abad", ""}));
  EXPECT_EQ(run({"\n\nUser"}, {"a\n", "\n", "\n", "Us"}, false, -1),
            (Strings{"a", "", "\n", "", "\n\nUs"}));
}

TEST(StopMatcher, NothingFollowsAMatch) {
  const auto automaton = std::make_shared<const StopAutomaton>(Strings{"b"});
  StopMatcher matcher(automaton, false);
  std::string out;
  ASSERT_EQ(matcher.append("abab", out), 0);
  EXPECT_EQ(out, "a");
  EXPECT_THROW(matcher.append("a", out), InternalError);
  EXPECT_THROW(matcher.would_match("a"), InternalError);
  matcher.finish(out);
  EXPECT_EQ(out, "a");
}

TEST(StopAutomaton, RefusesAnEmptyStopString) {
  EXPECT_THROW(StopAutomaton({"a", ""}), Error);
  EXPECT_TRUE(StopAutomaton({}).empty());
  EXPECT_FALSE(StopAutomaton({"a"}).empty());
}

// The two together: tokens cut both the stop string and its characters.
TEST(StopMatcher, StopsAtTheRightByteAcrossTokensAndCharacters) {
  const std::string text =
      "so \xE2\x82\xAC"
      "5 \xF0\x9F\x98\x80!";  // so €5 😀!
  for (const bool include : {false, true}) {
    for (const std::string stop :
         {"\xE2\x82\xAC"
          "5 \xF0\x9F\x98\x80",
          "\xF0\x9F\x98\x80", "\xE2\x82\xAC", "5 ", " \xE2\x82\xAC", "o"}) {
      const auto automaton = std::make_shared<const StopAutomaton>(Strings{stop});
      for (uint32_t cuts = 0; cuts < 1U << (text.size() - 1); ++cuts) {
        std::vector<testing::Piece> tokens;
        for (const std::string& piece : cut(text, cuts)) tokens.push_back({piece});
        const TokenTable table = make_table(tokens, TextDecoding::kByteLevel);
        Detokenizer detokenizer(table, true);
        StopMatcher matcher(automaton, include);
        std::string out, seen;
        int32_t found = -1;
        for (TokenId i = 0; i < table.size() && found < 0; ++i) {
          std::string piece;
          detokenizer.append(i, piece);
          seen += table.bytes(i);
          found = matcher.append(piece, out);
          // At the very token that ends it.
          ASSERT_EQ(found >= 0, seen.find(stop) != std::string::npos) << "cuts " << cuts;
        }
        ASSERT_EQ(found, 0);
        ASSERT_EQ(out, text.substr(0, text.find(stop) + (include ? stop.size() : 0)));
      }
    }
  }
}

// With byte fallback a character can be complete and still be held, for a later byte could spoil
// it.
TEST(StopMatcher, SeesAStopStringInBytesStillHeld) {
  const TokenTable table = make_table(
      {{"a"}, {"\xC3", TokenKind::kByte}, {"\xA9", TokenKind::kByte}}, TextDecoding::kByteFallback);
  Detokenizer detokenizer(table, true);
  StopMatcher matcher(std::make_shared<const StopAutomaton>(Strings{"a\xC3\xA9"}), false);
  std::string out;
  const auto found = [&](TokenId token) {
    std::string text, tail;
    detokenizer.append(token, text);
    EXPECT_EQ(matcher.append(text, out), -1);
    detokenizer.preview_tail(tail);
    return matcher.would_match(tail);
  };
  EXPECT_EQ(found(0), -1);
  EXPECT_EQ(found(1), -1);
  EXPECT_EQ(found(2), 0);
  std::string tail;
  detokenizer.finish(tail);
  EXPECT_EQ(matcher.append(tail, out), 0);
  EXPECT_EQ(out, "");
}

}  // namespace
}  // namespace vllm_lite
