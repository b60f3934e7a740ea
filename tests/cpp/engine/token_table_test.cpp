#include "engine/token_table.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/check.h"
#include "text_reference.h"

namespace vllm_lite {
namespace {

using testing::make_table;

constexpr auto kNormal = TokenKind::kNormal;

TEST(TokenTable, GivesEachTokenItsBytesAndKind) {
  const TokenTable table = make_table(
      {{"a"}, {""}, {"\xC3\xA9"}, {"</s>", TokenKind::kSpecial}, {"\xC3", TokenKind::kByte}},
      TextDecoding::kByteFallback);
  ASSERT_EQ(table.size(), 5);
  EXPECT_EQ(table.bytes(0), "a");
  EXPECT_EQ(table.bytes(1), "");
  EXPECT_EQ(table.bytes(2), "\xC3\xA9");
  EXPECT_EQ(table.bytes(3), "</s>");
  EXPECT_EQ(table.bytes(4), "\xC3");
  EXPECT_EQ(table.kind(3), TokenKind::kSpecial);
  EXPECT_EQ(table.kind(4), TokenKind::kByte);
}

TEST(TokenTable, IdsOutsideHaveNoText) {
  const TokenTable table =
      make_table({{"a"}, {"b", TokenKind::kSpecial}}, TextDecoding::kByteLevel);
  for (const TokenId id :
       {-1, 2, 1000000, std::numeric_limits<TokenId>::min(), std::numeric_limits<TokenId>::max()}) {
    EXPECT_EQ(table.bytes(id), "") << id;
    EXPECT_EQ(table.kind(id), kNormal) << id;
  }
  EXPECT_EQ(make_table({}, TextDecoding::kByteLevel).size(), 0);
}

TEST(TokenTable, RefusesSizesThatDoNotAgree) {
  const auto make = [](std::string bytes, std::vector<uint32_t> offsets, size_t num_kinds) {
    TokenTable(std::move(bytes), std::move(offsets), std::vector(num_kinds, kNormal),
               TextDecoding::kByteLevel);
  };
  EXPECT_NO_THROW(make("abc", {0, 1, 3}, 2));
  EXPECT_THROW(make("abc", {}, 0), Error);
  EXPECT_THROW(make("abc", {0, 1, 3}, 3), Error);
  EXPECT_THROW(make("abc", {0, 1, 3}, 1), Error);
  EXPECT_THROW(make("abc", {1, 2, 3}, 2), Error);
  EXPECT_THROW(make("abc", {0, 1, 2}, 2), Error);
  EXPECT_THROW(make("abc", {0, 1, 4}, 2), Error);
  EXPECT_THROW(make("abc", {0, 4, 3}, 2), Error);
  EXPECT_THROW(make("abc", {0, 2, 1, 3}, 3), Error);
}

TEST(TokenTable, RefusesTokensThatDoNotFitTheirKind) {
  const auto make = [](std::string bytes, TokenKind kind, TextDecoding decoding) {
    make_table({{std::move(bytes), kind}}, decoding);
  };
  EXPECT_THROW(make("", TokenKind::kByte, TextDecoding::kByteFallback), Error);
  EXPECT_THROW(make("ab", TokenKind::kByte, TextDecoding::kByteFallback), Error);
  EXPECT_THROW(make("\xC3", kNormal, TextDecoding::kByteFallback), Error);
  EXPECT_THROW(make("a", static_cast<TokenKind>(3), TextDecoding::kByteLevel), Error);
  EXPECT_NO_THROW(make("\xC3", TokenKind::kByte, TextDecoding::kByteFallback));
  EXPECT_NO_THROW(make("\xC3", kNormal, TextDecoding::kByteLevel));
}

}  // namespace
}  // namespace vllm_lite
