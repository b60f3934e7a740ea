// Slow, obvious versions of what the engine does with text, and helpers to build token tables.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/token_table.h"

namespace vllm_lite::testing {

inline const std::string kFffd = "\xEF\xBF\xBD";

// UTF-8 as RFC 3629 writes it; empty for what is no character.
inline std::string encode(uint32_t code_point) {
  const auto tail = [&](int shift) {
    return static_cast<char>(0x80 | ((code_point >> shift) & 0x3F));
  };
  if (code_point > 0x10FFFF || (code_point >= 0xD800 && code_point <= 0xDFFF)) return "";
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  if (code_point < 0x800) return {static_cast<char>(0xC0 | (code_point >> 6)), tail(0)};
  if (code_point < 0x10000) {
    return {static_cast<char>(0xE0 | (code_point >> 12)), tail(6), tail(0)};
  }
  return {static_cast<char>(0xF0 | (code_point >> 18)), tail(12), tail(6), tail(0)};
}

inline bool is_character(const std::string& bytes) {
  if (bytes.empty() || bytes.size() > 4) return false;
  static constexpr uint32_t kLeadMask[] = {0, 0x7F, 0x1F, 0x0F, 0x07};
  uint32_t code_point = static_cast<uint8_t>(bytes[0]) & kLeadMask[bytes.size()];
  for (size_t i = 1; i < bytes.size(); ++i) {
    code_point = code_point << 6 | (static_cast<uint8_t>(bytes[i]) & 0x3F);
  }
  return encode(code_point) == bytes;
}

// Whether `bytes` begins a character and does not end it. All beginnings there are, collected from
// all characters; those that differ in the last byte alone have the same ones, so every 64th is
// enough.
inline bool is_beginning(const std::string& bytes) {
  static const std::set<std::string> beginnings = [] {
    std::set<std::string> all;
    for (uint32_t code_point = 0; code_point <= 0x10FFFF; code_point += 64) {
      const std::string character = encode(code_point);
      for (size_t n = 1; n < character.size(); ++n) all.insert(character.substr(0, n));
    }
    return all;
  }();
  return beginnings.count(bytes) != 0;
}

// Text that nothing can change any more, and what would follow if the sequence ended here.
struct Decoded {
  std::string settled;
  std::string tail;
};

// The longest character, else the longest beginning of one, else a single byte; again and again.
inline Decoded decode_bytes(const std::string& bytes) {
  Decoded result;
  for (size_t at = 0; at < bytes.size();) {
    size_t length = 0;
    bool whole = false;
    for (size_t n = 1; n <= 4 && at + n <= bytes.size(); ++n) {
      if (is_character(bytes.substr(at, n))) length = n, whole = true;
    }
    for (size_t n = 1; !whole && n <= 3 && at + n <= bytes.size(); ++n) {
      if (is_beginning(bytes.substr(at, n))) length = n;
    }
    if (whole) {
      result.settled += bytes.substr(at, length);
    } else if (length != 0 && at + length == bytes.size()) {
      result.tail = kFffd;
    } else {
      result.settled += kFffd;
    }
    at += length == 0 ? 1 : length;
  }
  return result;
}

// What a run of byte tokens is worth; `closed` says that a token that is not one followed.
inline Decoded decode_run(const std::string& run, bool closed) {
  std::string complete = run;
  size_t incomplete = 0;
  for (size_t n = 1; n <= 3 && n <= run.size(); ++n) {
    if (is_beginning(run.substr(run.size() - n))) incomplete = n;
  }
  const Decoded head = decode_bytes(run.substr(0, run.size() - incomplete));
  const bool can_be_valid = head.settled + head.tail == run.substr(0, run.size() - incomplete);
  std::string text = run;
  if (!can_be_valid || incomplete != 0) {
    text.clear();
    for (size_t i = 0; i < run.size(); ++i) text += kFffd;
  }
  if (closed || !can_be_valid) return {text, ""};
  return {"", text};
}

struct Piece {
  std::string bytes;
  TokenKind kind = TokenKind::kNormal;
};

inline TokenTable make_table(const std::vector<Piece>& pieces, TextDecoding decoding) {
  std::string bytes;
  std::vector<uint32_t> offsets = {0};
  std::vector<TokenKind> kinds;
  for (const Piece& piece : pieces) {
    bytes += piece.bytes;
    offsets.push_back(static_cast<uint32_t>(bytes.size()));
    kinds.push_back(piece.kind);
  }
  return TokenTable(std::move(bytes), std::move(offsets), std::move(kinds), decoding);
}

// The pieces into which the bits of `cuts` cut `text`: bit i cuts after byte i.
inline std::vector<std::string> cut(const std::string& text, uint32_t cuts) {
  std::vector<std::string> pieces(1);
  for (size_t i = 0; i < text.size(); ++i) {
    pieces.back() += text[i];
    if (i + 1 < text.size() && (cuts >> i & 1) != 0) pieces.emplace_back();
  }
  return pieces;
}

}  // namespace vllm_lite::testing
