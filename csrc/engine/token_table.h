// Token id -> bytes, and how those bytes become text: what the engine core knows of a tokenizer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"

namespace vllm_lite {

enum class TextDecoding : uint8_t {
  // Byte-level BPE: all bytes concatenated, then UTF-8 with each maximal ill-formed part
  // (Unicode 3.9,
  // "substitution of maximal subparts", as Rust's from_utf8_lossy) replaced by U+FFFD.
  kByteLevel,
  // SentencePiece with byte fallback: ordinary tokens are whole text; a run of byte tokens (<0xNN>)
  // is one
  // string if it is valid UTF-8, else one U+FFFD for each byte of the run (tokenizers'
  // ByteFallback).
  kByteFallback,
};

enum class TokenKind : uint8_t {
  kNormal,
  kSpecial,  // hidden when skip_special_tokens
  kByte,     // a byte-fallback token: exactly one byte
};

class TokenTable {
 public:
  // `bytes` holds all tokens back to back, token i at [offsets[i], offsets[i+1]).
  // Throws Error if the sizes do not agree, a kByte token is not one byte, or, with kByteFallback,
  // any other token is not valid UTF-8.
  TokenTable(std::string bytes, std::vector<uint32_t> offsets, std::vector<TokenKind> kinds,
             TextDecoding decoding);

  int32_t size() const { return static_cast<int32_t>(kinds_.size()); }
  // Ids outside the table (negative, padding rows of the embedding) and holes in it have no text.
  std::string_view bytes(TokenId id) const;
  TokenKind kind(TokenId id) const;
  TextDecoding decoding() const { return decoding_; }

 private:
  std::string bytes_;
  std::vector<uint32_t> offsets_;
  std::vector<TokenKind> kinds_;
  TextDecoding decoding_;
};

}  // namespace vllm_lite
