// Finds the first stop string in a text that arrives in pieces.
//
// An Aho-Corasick automaton over bytes. Text is let out as soon as it can no longer be the
// beginning of a stop string: exactly the longest suffix that is a proper prefix of some stop
// string is held back. "First" is the match that ends first; of several that end there, the one
// that begins first. Constant time per byte of text, averaged over the text; no heap allocation
// besides the growth of the output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace vllm_lite {

// Built once per request, shared by its sequences. 28 bytes for each byte of the stop strings.
class StopAutomaton {
 public:
  // Throws Error for an empty stop string.
  explicit StopAutomaton(const std::vector<std::string>& stops);
  bool empty() const { return stops_.empty(); }
  const std::vector<std::string>& stops() const { return stops_; }

 private:
  friend class StopMatcher;

  // A state is the longest suffix of the text so far that is a prefix of some stop string. State 0
  // is the empty prefix; as a link, which never leads back to it, 0 is none.
  struct State {
    uint32_t depth = 0;         // length of that prefix
    int32_t path = 0;           // a stop string that begins with it
    int32_t match = -1;         // the longest stop string that ends here, or -1
    uint32_t suffix = 0;        // the longest proper suffix that is a state
    uint32_t first_child = 0;   // one byte longer
    uint32_t next_sibling = 0;  // another child of the same parent
    char byte = 0;              // the last one of the prefix
  };

  uint32_t child(uint32_t state, char byte) const;
  uint32_t next(uint32_t state, char byte) const;

  std::vector<std::string> stops_;
  std::vector<State> states_;
};

class StopMatcher {
 public:
  explicit StopMatcher(std::shared_ptr<const StopAutomaton> automaton, bool include_stop_in_output);

  // Feeds text. Appends to `out` what may be shown. Returns the index of the stop string found, or
  // -1. After a match nothing more may be fed; `out` then ends before the stop string, or with it
  // if it is to be included, and whatever followed the match in `text` is dropped.
  int32_t append(std::string_view text, std::string& out);
  // Feeds text in which a stop string that ends does not count; one that goes on after it does.
  void pass(std::string_view text, std::string& out);
  // Index of the stop string that feeding `text` would find, or -1; changes nothing.
  int32_t would_match(std::string_view text) const;
  // The sequence ended without a match: appends the text held back.
  void finish(std::string& out);

 private:
  // The text held back: a prefix of a stop string, so it need not be stored.
  std::string_view held() const;
  // Appends the first `length` bytes of what is held followed by `text`.
  void let_out(std::string_view text, size_t length, std::string& out) const;

  std::shared_ptr<const StopAutomaton> automaton_;
  bool include_stop_in_output_;
  bool matched_ = false;
  uint32_t state_ = 0;
};

}  // namespace vllm_lite
