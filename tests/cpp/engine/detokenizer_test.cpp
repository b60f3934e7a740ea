#include "engine/detokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "text_reference.h"

namespace vllm_lite {
namespace {

using testing::cut;
using testing::decode_bytes;
using testing::decode_run;
using testing::Decoded;
using testing::is_character;
using testing::kFffd;
using testing::make_table;
using testing::Piece;

// Decodes a whole sequence of tokens from scratch, as the tokenizer would.
Decoded reference(const std::vector<Piece>& pieces, const std::vector<TokenId>& tokens,
                  TextDecoding decoding, bool skip_special_tokens) {
  std::vector<Piece> shown;
  for (const TokenId token : tokens) {
    if (token < 0 || static_cast<size_t>(token) >= pieces.size()) continue;
    const Piece& piece = pieces[token];
    if (piece.bytes.empty()) continue;
    if (piece.kind == TokenKind::kSpecial && skip_special_tokens) continue;
    shown.push_back(piece);
  }
  std::string bytes;
  if (decoding == TextDecoding::kByteLevel) {
    for (const Piece& piece : shown) bytes += piece.bytes;
    return decode_bytes(bytes);
  }
  std::string text;
  for (const Piece& piece : shown) {
    if (piece.kind == TokenKind::kByte) {
      bytes += piece.bytes;
      continue;
    }
    text += decode_run(bytes, /*closed=*/true).settled + piece.bytes;
    bytes.clear();
  }
  const Decoded run = decode_run(bytes, /*closed=*/false);
  return {text + run.settled, run.tail};
}

void expect_whole_characters(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    size_t n = 1;
    while (n <= 4 && !is_character(text.substr(at, n))) ++n;
    ASSERT_LE(n, 4U) << "half a character in what was let out";
    at += n;
  }
}

// Feeds the tokens one by one; after each, what is out and what is previewed must be the
// reference's.
void check_stream(const std::vector<Piece>& pieces, const std::vector<TokenId>& tokens,
                  TextDecoding decoding, bool skip_special_tokens) {
  const TokenTable table = make_table(pieces, decoding);
  Detokenizer detokenizer(table, skip_special_tokens);
  std::string text;
  std::vector<TokenId> fed;
  for (const TokenId token : tokens) {
    std::string piece, tail;
    detokenizer.append(token, piece);
    ASSERT_NO_FATAL_FAILURE(expect_whole_characters(piece));
    text += piece;
    fed.push_back(token);
    const Decoded want = reference(pieces, fed, decoding, skip_special_tokens);
    ASSERT_EQ(text, want.settled) << "after " << fed.size() << " tokens";
    detokenizer.preview_tail(tail);
    ASSERT_EQ(tail, want.tail) << "after " << fed.size() << " tokens";
  }
  const Decoded want = reference(pieces, tokens, decoding, skip_special_tokens);
  detokenizer.finish(text);
  ASSERT_EQ(text, want.settled + want.tail);
  std::string tail;
  detokenizer.preview_tail(tail);
  ASSERT_EQ(tail, "") << "after finish() nothing is held";
}

std::string decode_pieces(const std::vector<std::string>& parts) {
  std::vector<Piece> pieces;
  for (const std::string& part : parts) pieces.push_back({part});
  const TokenTable table = make_table(pieces, TextDecoding::kByteLevel);
  Detokenizer detokenizer(table, false);
  std::string text;
  for (TokenId i = 0; i < table.size(); ++i) detokenizer.append(i, text);
  detokenizer.finish(text);
  return text;
}

std::string repeat(const std::string& text, int n) {
  std::string result;
  for (int i = 0; i < n; ++i) result += text;
  return result;
}

TEST(Detokenizer, ReplacesIllFormedPartsAsRustDoes) {
  const struct {
    std::string bytes, text;
  } cases[] = {
      {"a\xFF"
       "b",
       "a" + kFffd + "b"},
      {"\xC0\xAF", repeat(kFffd, 2)},      // overlong, two bytes
      {"\xE0\x80\x80", repeat(kFffd, 3)},  // overlong, three bytes
      {"\xE0\xA0", kFffd},                 // truncated
      {"\xE0\xA0"
       "a",
       kFffd + "a"},
      {"\xED\xA0\x80", repeat(kFffd, 3)},      // a surrogate
      {"\xED\x9F\xBF", "\xED\x9F\xBF"},        // the last before them
      {"\xEE\x80\x80", "\xEE\x80\x80"},        // the first after them
      {"\xF0\x80\x80\x80", repeat(kFffd, 4)},  // overlong, four bytes
      {"\xF0\x90\x80", kFffd},                 // truncated
      {"\xF0\x90\x80"
       "a",
       kFffd + "a"},
      {"\xF0\x90\x80\xF0\x90\x80\x80", kFffd + "\xF0\x90\x80\x80"},
      {"\xF4\x8F\xBF\xBF", "\xF4\x8F\xBF\xBF"},  // U+10FFFF
      {"\xF4\x90\x80\x80", repeat(kFffd, 4)},    // past it
      {"\xF5\x80", repeat(kFffd, 2)},
      {"\x80\xBF", repeat(kFffd, 2)},
      {"\xC3", kFffd},
      {"\xC3\xC3\xA9", kFffd + "\xC3\xA9"},
      // The example of Unicode 3.9, table 3-11.
      {"\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64",
       std::string("a") + repeat(kFffd, 3) + "b" + kFffd + "c" + repeat(kFffd, 2) + "d"},
      {std::string("\0x", 2), std::string("\0x", 2)},
  };
  for (const auto& [bytes, text] : cases) {
    for (uint32_t cuts = 0; cuts < 1U << (bytes.size() - 1); ++cuts) {
      ASSERT_EQ(decode_pieces(cut(bytes, cuts)), text) << "cuts " << cuts;
    }
  }
}

// Every byte string up to four long over the bytes at which table 3-7 changes, cut in every way.
TEST(Detokenizer, EveryCutOfEveryShortStringGivesTheSame) {
  const std::string alphabet = "\x41\x80\x8F\x90\x9F\xA0\xBF\xC1\xC2\xE0\xE1\xED\xF0\xF1\xF4\xF5";
  // One token for each string, in order of length, then of the strings as numbers of base 16.
  std::vector<Piece> pieces = {{""}};
  for (size_t i = 0; pieces[i].bytes.size() < 4; ++i) {
    for (const char byte : alphabet) pieces.push_back({pieces[i].bytes + byte});
  }
  const auto id_of = [&](const std::string& bytes) {
    size_t id = 0;
    for (const char byte : bytes) id = id * alphabet.size() + alphabet.find(byte) + 1;
    return static_cast<TokenId>(id);
  };
  const TokenTable table = make_table(pieces, TextDecoding::kByteLevel);
  for (TokenId id = 1; id < table.size(); ++id) {
    const std::string bytes(table.bytes(id));
    ASSERT_EQ(id_of(bytes), id);
    const Decoded want = decode_bytes(bytes);
    for (uint32_t cuts = 0; cuts < 1U << (bytes.size() - 1); ++cuts) {
      Detokenizer detokenizer(table, false);
      std::string text;
      for (const std::string& piece : cut(bytes, cuts)) detokenizer.append(id_of(piece), text);
      ASSERT_EQ(text, want.settled) << "string " << id << " cuts " << cuts;
      detokenizer.finish(text);
      ASSERT_EQ(text, want.settled + want.tail) << "string " << id << " cuts " << cuts;
    }
  }
}

// TOK-01
TEST(Detokenizer, EmitsAtOnceWhatLaterBytesCannotChange) {
  const TokenTable table =
      make_table({{"\xFF"}, {"\xE2"}, {"\x82"}, {"\xAC"}, {"a"}}, TextDecoding::kByteLevel);
  Detokenizer detokenizer(table, false);
  const auto append = [&](TokenId token) {
    std::string text;
    detokenizer.append(token, text);
    return text;
  };
  EXPECT_EQ(append(0), kFffd);
  EXPECT_EQ(append(1), "");
  EXPECT_EQ(append(2), "");
  EXPECT_EQ(append(3), "\xE2\x82\xAC");
  EXPECT_EQ(append(1), "");
  EXPECT_EQ(append(1), kFffd);  // the first can go, the second may still begin something
  EXPECT_EQ(append(4), kFffd + "a");
}

// Half characters, bytes that are never valid, holes, hidden tokens, ids outside the table.
std::vector<Piece> awkward_pieces(TextDecoding decoding) {
  std::vector<Piece> pieces = {{"a"},
                               {" the"},
                               {"\xC3\xA9"},
                               {"\xF0\x9F\x98\x80"},
                               {""},
                               {"<s>", TokenKind::kSpecial},
                               {"\xE2\x82\xAC", TokenKind::kSpecial},
                               {"", TokenKind::kSpecial}};
  const std::string bytes = "\x41\x80\x98\x9F\xA0\xA9\xBF\xC3\xE0\xE2\xED\xF0\xF4\xFF";
  for (const char byte : bytes) {
    // The bytes of a few characters several times, so that valid runs are not rare.
    for (int i = 0; i < (byte == '\x80' || byte == '\xFF' ? 1 : 2); ++i) {
      pieces.push_back({std::string(1, byte), TokenKind::kByte});
    }
  }
  if (decoding == TextDecoding::kByteLevel) {
    for (const char* half :
         {"\xF0\x9F", "\x98\x80", "\xE2\x82",
          "\xAC"
          "x",
          "x\xC3", "\xED\xA0", "\x80\x80\x80", "\xF0\x9F\x98\x80\xF0", "\xFF\xFE"}) {
      pieces.push_back({half});
    }
    pieces.push_back({"\xC3", TokenKind::kSpecial});
  }
  return pieces;
}

// TOK-01, TOK-03
TEST(Detokenizer, RandomTokensMatchTheReferenceAfterEveryToken) {
  std::mt19937 random(1);
  for (const TextDecoding decoding : {TextDecoding::kByteLevel, TextDecoding::kByteFallback}) {
    const std::vector<Piece> pieces = awkward_pieces(decoding);
    std::uniform_int_distribution<TokenId> any(-2, static_cast<TokenId>(pieces.size()) + 1);
    for (int round = 0; round < 2000; ++round) {
      std::vector<TokenId> tokens(round % 20 + 1);
      for (TokenId& token : tokens) token = any(random);
      SCOPED_TRACE("round " + std::to_string(round));
      ASSERT_NO_FATAL_FAILURE(check_stream(pieces, tokens, decoding, round % 2 == 0));
    }
  }
}

TEST(Detokenizer, RandomCutsOfLongStreamsGiveTheSame) {
  std::mt19937 random(2);
  for (int round = 0; round < 30; ++round) {
    std::string bytes;
    while (bytes.size() < 3000) {
      const std::string character = testing::encode(random() % 0x110000 >> random() % 21);
      bytes += character;
      if (random() % 8 == 0) bytes += static_cast<char>(random());
      if (random() % 8 == 0) bytes.pop_back();
    }
    const Decoded want = decode_bytes(bytes);
    std::vector<std::string> parts;
    for (size_t at = 0; at < bytes.size();) {
      const size_t length = random() % 7;
      parts.push_back(bytes.substr(at, length));
      at += length;
    }
    ASSERT_EQ(decode_pieces(parts), want.settled + want.tail) << "round " << round;
  }
}

// The ids of byte tokens are the bytes themselves; 256 is a word, 257 hidden, 258 a hole.
class ByteFallback : public ::testing::Test {
 protected:
  ByteFallback() : table_(make_table(pieces(), TextDecoding::kByteFallback)) {}

  static std::vector<Piece> pieces() {
    std::vector<Piece> all;
    for (int i = 0; i < 256; ++i) all.push_back({{static_cast<char>(i)}, TokenKind::kByte});
    all.push_back({"word"});
    all.push_back({"</s>", TokenKind::kSpecial});
    all.push_back({""});
    return all;
  }
  std::string append(TokenId token) {
    std::string text;
    detokenizer_.append(token, text);
    return text;
  }
  std::string tail() const {
    std::string text;
    detokenizer_.preview_tail(text);
    return text;
  }

  TokenTable table_;
  Detokenizer detokenizer_{table_, true};
};

TEST_F(ByteFallback, HoldsARunUntilItIsSettled) {
  EXPECT_EQ(append(0xC3), "");
  EXPECT_EQ(tail(), kFffd);
  EXPECT_EQ(append(0xA9), "");
  EXPECT_EQ(tail(), "\xC3\xA9");
  EXPECT_EQ(append('x'), "");
  EXPECT_EQ(append(256), "\xC3\xA9xword");
  EXPECT_EQ(tail(), "");
}

TEST_F(ByteFallback, OneBadByteSpoilsTheWholeRun) {
  EXPECT_EQ(append('x'), "");
  EXPECT_EQ(append(0xC3), "");
  EXPECT_EQ(append('y'), repeat(kFffd, 3));  // no later byte can save it
  EXPECT_EQ(append('z'), kFffd);
  EXPECT_EQ(append(256), "word");
  EXPECT_EQ(append('z'), "");  // a new run
  EXPECT_EQ(tail(), "z");
}

TEST_F(ByteFallback, HiddenTokensAndHolesDoNotEndARun) {
  for (const TokenId nothing : {257, 258, 259, -1}) {
    EXPECT_EQ(append(0xC3), "");
    EXPECT_EQ(append(nothing), "");
    EXPECT_EQ(append(0xA9), "");
    EXPECT_EQ(append(256), "\xC3\xA9word") << nothing;
  }
  Detokenizer showing(table_, false);
  std::string text;
  for (const TokenId token : {0xC3, 257, 0xA9}) showing.append(token, text);
  showing.finish(text);
  EXPECT_EQ(text, kFffd + "</s>" + kFffd);
}

}  // namespace
}  // namespace vllm_lite
