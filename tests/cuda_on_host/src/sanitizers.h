// What the sanitizers are told; nothing in a plain build.
//
// Under ThreadSanitizer the kernels are instrumented and this library is not: whatever it reads or
// writes in a kernel's memory is announced here, and only `publish` and `observe` make an order
// between CUDA threads.
#pragma once

#include <cstddef>

#if defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_read_range(void* address, unsigned long bytes);
extern "C" void __tsan_write_range(void* address, unsigned long bytes);
extern "C" void __tsan_func_entry(void* return_address);
extern "C" void __tsan_func_exit();
#endif

namespace cuda_on_host {

#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

inline void poison([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#if defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
  __asan_poison_memory_region(p, bytes);
#endif
}

inline void unpoison([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#if defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
  __asan_unpoison_memory_region(p, bytes);
#endif
}

// Whether an array there is known to be out of scope.
inline bool is_poisoned([[maybe_unused]] void* p, [[maybe_unused]] size_t bytes) {
#if defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
  return __asan_region_is_poisoned(p, bytes) != nullptr;
#else
  return false;
#endif
}

// What the running thread did so far happens before what others do after observe(token).
inline void publish([[maybe_unused]] void* token) {
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  __tsan_release(token);
#endif
}

inline void observe([[maybe_unused]] void* token) {
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  __tsan_acquire(token);
#endif
}

inline void announce_read([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  __tsan_read_range(const_cast<void*>(p), bytes);
#elif defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
  // An instrumented read, now: the copy itself comes later, when its caller cannot be seen.
  for (size_t i = 0; i < bytes; ++i) static_cast<void>(static_cast<const volatile char*>(p)[i]);
#endif
}

inline void announce_write([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  __tsan_write_range(const_cast<void*>(p), bytes);
#endif
}

// While it lives, reports name the place in the kernel that called this library:
// KernelFrame frame(__builtin_return_address(0)).
class KernelFrame {
 public:
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  explicit KernelFrame(void* return_address) { __tsan_func_entry(return_address); }
  ~KernelFrame() { __tsan_func_exit(); }
#else
  explicit KernelFrame(void*) {}
#endif
  KernelFrame(const KernelFrame&) = delete;
  KernelFrame& operator=(const KernelFrame&) = delete;
};

}  // namespace cuda_on_host
