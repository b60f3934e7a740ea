// Tokens to text, one token at a time, for one sequence.
//
// Invariant "split": the concatenation of everything returned by append() and finish() equals the
// tokenizer's own decode of all the tokens, however they were grouped; no piece ends inside a
// character. Only complete code points leave: bytes that later tokens can still change are held.
#pragma once

#include <string>
#include <string_view>

#include "engine/token_table.h"

namespace vllm_lite {

class Detokenizer {
 public:
  // `table` must outlive this.
  Detokenizer(const TokenTable& table, bool skip_special_tokens)
      : table_(&table), skip_special_tokens_(skip_special_tokens) {}

  // Appends the text that `token` completes to `text`. At most O(bytes of the token + bytes held).
  void append(TokenId token, std::string& text);
  // What the text would still gain if the sequence ended here, without changing anything: for
  // matching stop strings against bytes that are still held.
  void preview_tail(std::string& text) const;
  // The sequence ended: appends what is held, ill-formed parts as U+FFFD.
  void finish(std::string& text);

 private:
  void append_bytes(std::string_view bytes, std::string& text);
  void append_byte_token(char byte, std::string& text);

  const TokenTable* table_;
  bool skip_special_tokens_;
  // Byte level: the one to three bytes of a character that has not ended. Byte fallback: the run of
  // byte tokens, as long as it can still turn out valid; empty once run_is_ill_formed_.
  std::string held_;
  size_t num_complete_ = 0;         // bytes of the run that are whole characters
  bool run_is_ill_formed_ = false;  // each further byte of this run is one U+FFFD at once
};

}  // namespace vllm_lite
