#include "engine/token_table.h"

#include <limits>
#include <utility>

#include "core/check.h"
#include "engine/utf8.h"

namespace vllm_lite {

TokenTable::TokenTable(std::string bytes, std::vector<uint32_t> offsets,
                       std::vector<TokenKind> kinds, TextDecoding decoding)
    : bytes_(std::move(bytes)),
      offsets_(std::move(offsets)),
      kinds_(std::move(kinds)),
      decoding_(decoding) {
  VL_CHECK(kinds_.size() < static_cast<size_t>(std::numeric_limits<TokenId>::max()),
           "TokenTable: " + std::to_string(kinds_.size()) +
               " tokens are more than 32-bit token ids can name");
  VL_CHECK(offsets_.size() == kinds_.size() + 1,
           "TokenTable: offsets has " + std::to_string(offsets_.size()) + " entries for " +
               std::to_string(kinds_.size()) + " kinds; it must have one more than kinds");
  VL_CHECK(offsets_.front() == 0 && offsets_.back() == bytes_.size(),
           "TokenTable: offsets run from " + std::to_string(offsets_.front()) + " to " +
               std::to_string(offsets_.back()) + "; they must run from 0 to the " +
               std::to_string(bytes_.size()) + " bytes given");
  for (size_t i = 0; i < kinds_.size(); ++i) {
    const auto token = [i] { return "TokenTable: token " + std::to_string(i); };
    VL_CHECK(offsets_[i] <= offsets_[i + 1], token() + " ends before it begins (offsets " +
                                                 std::to_string(offsets_[i]) + ", " +
                                                 std::to_string(offsets_[i + 1]) + ")");
    const auto kind = static_cast<unsigned>(kinds_[i]);
    VL_CHECK(kind <= static_cast<unsigned>(TokenKind::kByte),
             token() + " has the unknown kind " + std::to_string(kind));
    const std::string_view text = this->bytes(static_cast<TokenId>(i));
    if (kinds_[i] == TokenKind::kByte) {
      VL_CHECK(text.size() == 1, token() + " is a byte token of " + std::to_string(text.size()) +
                                     " bytes; it must be exactly one");
    } else if (decoding_ == TextDecoding::kByteFallback) {
      VL_CHECK(is_well_formed_utf8(text),
               token() +
                   " is not valid UTF-8; with byte fallback only byte tokens may be part of "
                   "a character");
    }
  }
}

std::string_view TokenTable::bytes(TokenId id) const {
  if (id < 0 || id >= size()) return {};
  return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
}

TokenKind TokenTable::kind(TokenId id) const {
  return id < 0 || id >= size() ? TokenKind::kNormal : kinds_[id];
}

}  // namespace vllm_lite
