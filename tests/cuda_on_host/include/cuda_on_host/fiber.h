// A stack and a place to go on from: what lets hundreds of CUDA threads share one OS thread.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_on_host {

// The sanitizers are told of every switch: AddressSanitizer knows the stack, ThreadSanitizer takes
// each fiber for a thread of its own, and a switch for no synchronisation.
class Fiber {
 public:
  Fiber() = default;  // the running OS thread's own stack, once it is switched away from
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next switch to this fiber calls `entry`, which must never return. May be called again
  // however the last run ended; what was on the stack is abandoned.
  void start(std::byte* stack, size_t bytes, void (*entry)());
  // To be called by the OS thread whose own fiber this is.
  void adopt_os_thread();

  // Leaves `from`, continues `to`; returns when something switches back to `from`.
  static void switch_to(Fiber& from, Fiber& to, bool from_ends = false);
  // Must be the first thing that `entry` does.
  static void entered();

 private:
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
  // For AddressSanitizer.
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;
  // For ThreadSanitizer.
  void* tsan_fiber_ = nullptr;
  bool owns_tsan_fiber_ = false;
};

}  // namespace cuda_on_host
