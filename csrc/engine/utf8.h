// UTF-8 one part at a time: the only place that knows which byte sequences are characters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace vllm_lite {

// What a reader of broken UTF-8 sees in place of each ill-formed part: U+FFFD.
inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

// The beginning of a byte string.
struct Utf8Part {
  enum class Kind : uint8_t {
    kCharacter,   // `length` bytes are one code point
    kIllFormed,   // `length` bytes are a maximal subpart: one U+FFFD, whatever follows
    kIncomplete,  // all `length` bytes there are begin a code point whose end has not come yet
  };
  size_t length;
  Kind kind;
};

// The first part of `text`, which must not be empty. Follows table 3-7 of the Unicode standard
// (well-formed sequences) and its substitution of maximal subparts, so that replacing each
// kIllFormed part, and a kIncomplete one at the end, gives what Rust's from_utf8_lossy gives.
inline Utf8Part first_utf8_part(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {1, Utf8Part::Kind::kCharacter};
  if (lead < 0xC2 || lead > 0xF4) return {1, Utf8Part::Kind::kIllFormed};
  // Overlong forms, surrogates and code points past U+10FFFF are all told by the second byte.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {i, Utf8Part::Kind::kIncomplete};
    const bool second = i == 1;
    if (byte(i) < (second ? low : 0x80) || byte(i) > (second ? high : 0xBF)) {
      return {i, Utf8Part::Kind::kIllFormed};
    }
  }
  return {length, Utf8Part::Kind::kCharacter};
}

inline bool is_well_formed_utf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8Part part = first_utf8_part(text);
    if (part.kind != Utf8Part::Kind::kCharacter) return false;
    text.remove_prefix(part.length);
  }
  return true;
}

}  // namespace vllm_lite
