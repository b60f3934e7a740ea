// Finds the first stop string in a text that arrives in pieces.
//
// An Aho-Corasick automaton over bytes. Text is let out as soon as it can no longer be the beginning of
// a stop string: exactly the longest suffix that is a proper prefix of some stop string is held back.
// "First" is the match that ends first; of several that end there, the one that begins first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace vllm_lite {

// Built once per request, shared by its sequences.
class StopAutomaton {
 public:
  // Throws Error for an empty stop string.
  explicit StopAutomaton(const std::vector<std::string>& stops);
  bool empty() const { return stops_.empty(); }
  const std::vector<std::string>& stops() const { return stops_; }

 private:
  friend class StopMatcher;
  std::vector<std::string> stops_;
};

class StopMatcher {
 public:
  explicit StopMatcher(std::shared_ptr<const StopAutomaton> automaton, bool include_stop_in_output);

  // Feeds text. Appends to `out` what may be shown. Returns the index of the stop string found, or -1.
  // After a match nothing more may be fed; `out` then ends before the stop string, or with it if it is
  // to be included, and whatever followed the match in `text` is dropped.
  int32_t append(std::string_view text, std::string& out);
  // Index of the stop string that feeding `text` would find, or -1; changes nothing.
  int32_t would_match(std::string_view text) const;
  // The sequence ended without a match: appends the text held back.
  void finish(std::string& out);

 private:
  std::shared_ptr<const StopAutomaton> automaton_;
  bool include_stop_in_output_;
  std::string held_;
};

}  // namespace vllm_lite
