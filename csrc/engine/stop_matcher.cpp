#include "engine/stop_matcher.h"

#include <utility>

#include "core/check.h"

namespace vllm_lite {

StopAutomaton::StopAutomaton(const std::vector<std::string>& stops) : stops_(stops), states_(1) {
  for (size_t i = 0; i < stops_.size(); ++i) {
    VL_CHECK(!stops_[i].empty(),
             "stop[" + std::to_string(i) + "] is an empty string; leave it out");
    for (const char byte : stops_[i]) {
      uint16_t& column = column_[static_cast<uint8_t>(byte)];
      if (column == 0) column = static_cast<uint16_t>(num_columns_++);
    }
  }

  // The trie. 0, which is nobody's child, stands for "no such child".
  next_.resize(num_columns_);
  for (size_t i = 0; i < stops_.size(); ++i) {
    uint32_t state = 0;
    for (const char byte : stops_[i]) {
      const size_t edge = size_t{state} * num_columns_ + column_[static_cast<uint8_t>(byte)];
      if (next_[edge] == 0) {
        next_[edge] = static_cast<uint32_t>(states_.size());
        states_.push_back({states_[state].depth + 1, static_cast<int32_t>(i), -1});
        next_.resize(next_.size() + num_columns_);
      }
      state = next_[edge];
    }
    if (states_[state].match < 0) states_[state].match = static_cast<int32_t>(i);
  }

  // Breadth first, each missing child becomes what the longest proper suffix would do: its row is
  // complete by then, for it is shorter.
  std::vector<uint32_t> suffix(states_.size(), 0), queue = {0};
  queue.reserve(states_.size());
  for (size_t head = 0; head < queue.size(); ++head) {
    const uint32_t state = queue[head];
    for (size_t column = 0; column < num_columns_; ++column) {
      uint32_t& child = next_[size_t{state} * num_columns_ + column];
      const uint32_t fallback =
          state == 0 ? 0 : next_[size_t{suffix[state]} * num_columns_ + column];
      if (child == 0) {
        child = fallback;
        continue;
      }
      suffix[child] = fallback;
      if (states_[child].match < 0) states_[child].match = states_[fallback].match;
      queue.push_back(child);
    }
  }
}

StopMatcher::StopMatcher(std::shared_ptr<const StopAutomaton> automaton,
                         bool include_stop_in_output)
    : automaton_(std::move(automaton)), include_stop_in_output_(include_stop_in_output) {
  VL_ASSERT(automaton_ != nullptr);
}

std::string_view StopMatcher::held() const {
  const StopAutomaton::State& state = automaton_->states_[state_];
  if (state.depth == 0) return {};
  return std::string_view(automaton_->stops_[state.path]).substr(0, state.depth);
}

int32_t StopMatcher::append(std::string_view text, std::string& out) {
  VL_ASSERT(!matched_);
  const std::string_view before = held();
  // Appends the first `length` bytes of what was held followed by `text`.
  const auto let_out = [&](size_t length) {
    out.append(before.substr(0, length));
    if (length > before.size()) out.append(text.substr(0, length - before.size()));
  };

  uint32_t state = state_;
  for (size_t i = 0; i < text.size(); ++i) {
    state = automaton_->next(state, text[i]);
    const int32_t match = automaton_->states_[state].match;
    if (match < 0) continue;
    const size_t stop_length = include_stop_in_output_ ? 0 : automaton_->stops_[match].size();
    let_out(before.size() + i + 1 - stop_length);
    matched_ = true;
    state_ = 0;
    return match;
  }
  let_out(before.size() + text.size() - automaton_->states_[state].depth);
  state_ = state;
  return -1;
}

int32_t StopMatcher::would_match(std::string_view text) const {
  VL_ASSERT(!matched_);
  uint32_t state = state_;
  for (const char byte : text) {
    state = automaton_->next(state, byte);
    if (automaton_->states_[state].match >= 0) return automaton_->states_[state].match;
  }
  return -1;
}

void StopMatcher::finish(std::string& out) {
  out.append(held());
  state_ = 0;
}

}  // namespace vllm_lite
