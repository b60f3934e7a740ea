#include "engine/detokenizer.h"

#include "engine/utf8.h"

namespace vllm_lite {

void Detokenizer::append(TokenId token, std::string& text) {
  const TokenKind kind = table_->kind(token);
  // Tokenizers drop hidden tokens and ids without text before they decode, so neither ends a run of
  // byte tokens nor a character in the making.
  if (kind == TokenKind::kSpecial && skip_special_tokens_) return;
  const std::string_view bytes = table_->bytes(token);
  if (bytes.empty()) return;

  if (table_->decoding() == TextDecoding::kByteLevel) {
    append_bytes(bytes, text);
  } else if (kind == TokenKind::kByte) {
    append_byte_token(bytes.front(), text);
  } else {
    finish(text);
    text.append(bytes);
  }
}

void Detokenizer::append_bytes(std::string_view bytes, std::string& text) {
  const bool joined = !held_.empty();
  if (joined) held_.append(bytes);
  const std::string_view input = joined ? std::string_view(held_) : bytes;

  // [copied, done) is well formed and leaves in one piece.
  size_t copied = 0, done = 0;
  while (done < input.size()) {
    const Utf8Part part = first_utf8_part(input.substr(done));
    if (part.kind == Utf8Part::Kind::kIncomplete) break;
    if (part.kind == Utf8Part::Kind::kIllFormed) {
      text.append(input.substr(copied, done - copied)).append(kReplacementCharacter);
      copied = done + part.length;
    }
    done += part.length;
  }
  text.append(input.substr(copied, done - copied));
  if (joined) {
    held_.erase(0, done);
  } else {
    held_.assign(input.substr(done));
  }
}

void Detokenizer::append_byte_token(char byte, std::string& text) {
  if (run_is_ill_formed_) {
    text.append(kReplacementCharacter);
    return;
  }
  held_.push_back(byte);
  const Utf8Part part = first_utf8_part(std::string_view(held_).substr(num_complete_));
  if (part.kind == Utf8Part::Kind::kCharacter) {
    num_complete_ = held_.size();
  } else if (part.kind == Utf8Part::Kind::kIllFormed) {
    // Nothing can make this run valid any more: it is settled before it has ended.
    preview_tail(text);
    held_.clear();
    num_complete_ = 0;
    run_is_ill_formed_ = true;
  }
}

void Detokenizer::preview_tail(std::string& text) const {
  if (held_.empty()) return;
  if (table_->decoding() == TextDecoding::kByteLevel) {
    text.append(kReplacementCharacter);  // what is held is one incomplete character
  } else if (num_complete_ == held_.size()) {
    text.append(held_);
  } else {
    for (size_t i = 0; i < held_.size(); ++i) text.append(kReplacementCharacter);
  }
}

void Detokenizer::finish(std::string& text) {
  preview_tail(text);
  held_.clear();
  num_complete_ = 0;
  run_is_ill_formed_ = false;
}

}  // namespace vllm_lite
