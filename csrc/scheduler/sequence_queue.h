// The waiting queue and the running list: sequences in the order in which they are served.
//
// Order: arrival (first come), or (priority, arrival). Arrivals are unique, so the order is total,
// and a preempted sequence, which keeps its arrival, comes back in front of those that arrived
// after it.
//
// Cost: everything O(1) but insert, which walks from both ends at once and stops at the nearer:
// O(1) for a new arrival (back), for a preempted sequence (front) and for an urgent one before many
// that are not; at worst half the queue.
#pragma once

#include <cstddef>

#include "core/intrusive_list.h"
#include "scheduler/sequence.h"

namespace vllm_lite {

class SequenceQueue {
 public:
  explicit SequenceQueue(bool by_priority) : by_priority_(by_priority) {}

  bool empty() const { return list_.empty(); }
  int32_t size() const { return static_cast<int32_t>(list_.size()); }
  Sequence* front() const { return list_.front(); }
  Sequence* back() const { return list_.back(); }
  Sequence* next(const Sequence* sequence) const { return list_.next(sequence); }

  // True if `a` is served before `b`.
  bool before(const Sequence& a, const Sequence& b) const {
    if (by_priority_ && a.priority != b.priority) return a.priority < b.priority;
    return a.arrival < b.arrival;
  }

  // REQUIRES: the sequence is in no list.
  void insert(Sequence* sequence) {
    Sequence* first = list_.front();
    Sequence* last = list_.back();
    while (last != nullptr && !before(*last, *sequence)) {
      if (before(*sequence, *first)) return list_.insert_before(first, sequence);
      first = list_.next(first);
      last = list_.prev(last);
    }
    if (last == nullptr) return list_.push_front(sequence);
    list_.insert_before(list_.next(last), sequence);
  }

  // REQUIRES: the sequence is in this list.
  void erase(Sequence* sequence) { list_.erase(sequence); }

 private:
  const bool by_priority_;
  IntrusiveList<Sequence, &Sequence::hook> list_;
};

}  // namespace vllm_lite
