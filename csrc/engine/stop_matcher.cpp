#include "engine/stop_matcher.h"

#include <utility>

#include "core/check.h"

namespace vllm_lite {

StopAutomaton::StopAutomaton(const std::vector<std::string>& stops) : stops_(stops), states_(1) {
  for (size_t i = 0; i < stops_.size(); ++i) {
    VL_CHECK(!stops_[i].empty(),
             "stop[" + std::to_string(i) + "] is an empty string; leave it out");
    uint32_t state = 0;
    for (const char byte : stops_[i]) {
      uint32_t longer = child(state, byte);
      if (longer == 0) {
        longer = static_cast<uint32_t>(states_.size());
        State made;
        made.depth = states_[state].depth + 1;
        made.path = static_cast<int32_t>(i);
        made.next_sibling = states_[state].first_child;
        made.byte = byte;
        states_[state].first_child = longer;
        states_.push_back(made);
      }
      state = longer;
    }
    if (states_[state].match < 0) states_[state].match = static_cast<int32_t>(i);
  }

  // Shorter prefixes first: a state's suffix is shorter than it.
  std::vector<uint32_t> queue = {0};
  queue.reserve(states_.size());
  for (size_t head = 0; head < queue.size(); ++head) {
    const uint32_t parent = queue[head];
    for (uint32_t i = states_[parent].first_child; i != 0; i = states_[i].next_sibling) {
      State& state = states_[i];
      if (parent != 0) state.suffix = next(states_[parent].suffix, state.byte);
      if (state.match < 0) state.match = states_[state.suffix].match;
      queue.push_back(i);
    }
  }
}

uint32_t StopAutomaton::child(uint32_t state, char byte) const {
  uint32_t i = states_[state].first_child;
  while (i != 0 && states_[i].byte != byte) i = states_[i].next_sibling;
  return i;
}

uint32_t StopAutomaton::next(uint32_t state, char byte) const {
  for (;;) {
    const uint32_t longer = child(state, byte);
    if (longer != 0 || state == 0) return longer;
    state = states_[state].suffix;
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

void StopMatcher::let_out(std::string_view text, size_t length, std::string& out) const {
  const std::string_view before = held();
  out.append(before.substr(0, length));
  if (length > before.size()) out.append(text.substr(0, length - before.size()));
}

int32_t StopMatcher::append(std::string_view text, std::string& out) {
  VL_ASSERT(!matched_);
  const size_t num_held = held().size();
  uint32_t state = state_;
  for (size_t i = 0; i < text.size(); ++i) {
    state = automaton_->next(state, text[i]);
    const int32_t match = automaton_->states_[state].match;
    if (match < 0) continue;
    const size_t stop_length = include_stop_in_output_ ? 0 : automaton_->stops_[match].size();
    let_out(text, num_held + i + 1 - stop_length, out);
    matched_ = true;
    state_ = 0;
    return match;
  }
  let_out(text, num_held + text.size() - automaton_->states_[state].depth, out);
  state_ = state;
  return -1;
}

void StopMatcher::pass(std::string_view text, std::string& out) {
  VL_ASSERT(!matched_);
  const std::vector<StopAutomaton::State>& states = automaton_->states_;
  uint32_t state = state_;
  for (const char byte : text) state = automaton_->next(state, byte);
  // A whole stop string that is not the beginning of a longer one need not be held.
  while (state != 0 && states[state].first_child == 0) state = states[state].suffix;
  let_out(text, held().size() + text.size() - states[state].depth, out);
  state_ = state;
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
