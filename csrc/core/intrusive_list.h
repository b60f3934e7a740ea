// Doubly linked list through a hook inside the element: no allocation, O(1) insert and erase.
//
// Invariant: an element is in at most one list per hook; hook.linked() says whether it is.
#pragma once

#include <cstddef>

namespace vllm_lite {

struct ListHook {
  ListHook* prev = nullptr;
  ListHook* next = nullptr;
  bool linked() const { return next != nullptr; }
};

// `Hook` is the pointer to the hook member, e.g. IntrusiveList<Sequence, &Sequence::hook>.
template <typename T, ListHook T::* Hook>
class IntrusiveList {
 public:
  IntrusiveList() { clear_links(); }
  IntrusiveList(const IntrusiveList&) = delete;
  IntrusiveList& operator=(const IntrusiveList&) = delete;

  bool empty() const { return head_.next == &head_; }
  size_t size() const { return size_; }

  T* front() const { return empty() ? nullptr : owner(head_.next); }
  T* back() const { return empty() ? nullptr : owner(head_.prev); }
  // The neighbour in the list, or nullptr at the end.
  T* next(const T* element) const {
    const ListHook* hook = (element->*Hook).next;
    return hook == &head_ ? nullptr : owner(const_cast<ListHook*>(hook));
  }
  T* prev(const T* element) const {
    const ListHook* hook = (element->*Hook).prev;
    return hook == &head_ ? nullptr : owner(const_cast<ListHook*>(hook));
  }

  void push_back(T* element) { link_before(&head_, element); }
  void push_front(T* element) { link_before(head_.next, element); }
  // Inserts before `position`; nullptr means at the end.
  void insert_before(T* position, T* element) {
    link_before(position ? &(position->*Hook) : &head_, element);
  }
  // REQUIRES: the element is in this list.
  void erase(T* element) {
    ListHook& hook = element->*Hook;
    hook.prev->next = hook.next;
    hook.next->prev = hook.prev;
    hook.prev = hook.next = nullptr;
    --size_;
  }

 private:
  static T* owner(ListHook* hook) {
    alignas(T) static char storage[sizeof(T)];
    const T* probe = reinterpret_cast<const T*>(storage);
    const auto offset = reinterpret_cast<const char*>(&(probe->*Hook)) - storage;
    return reinterpret_cast<T*>(reinterpret_cast<char*>(hook) - offset);
  }
  void link_before(ListHook* position, T* element) {
    ListHook& hook = element->*Hook;
    hook.prev = position->prev;
    hook.next = position;
    position->prev->next = &hook;
    position->prev = &hook;
    ++size_;
  }
  void clear_links() { head_.prev = head_.next = &head_; }

  ListHook head_;
  size_t size_ = 0;
};

}  // namespace vllm_lite
