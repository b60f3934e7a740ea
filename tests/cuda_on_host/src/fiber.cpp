#include "cuda_on_host/fiber.h"

#include <sys/mman.h>

#include <mutex>
#include <new>

#include "sanitizers.h"

namespace cuda_on_host {

#if defined(__x86_64__)
// Saves the callee-saved registers and the stack pointer, and goes on where `load` was saved.
extern "C" void cuda_on_host_switch_stack(void** save, void* load);
asm(R"(
.text
.hidden cuda_on_host_switch_stack
.globl cuda_on_host_switch_stack
.type cuda_on_host_switch_stack, @function
cuda_on_host_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_host_switch_stack, . - cuda_on_host_switch_stack
)");
constexpr int kSavedRegisters = 6;
#endif

namespace {

std::mutex unused_stacks_mutex;
#if defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
// The fiber that the OS thread left last, and the one it is in.
constinit thread_local Fiber* previous = nullptr;
constinit thread_local Fiber* running = nullptr;
#endif

}  // namespace

std::vector<Fiber::Stack>& Fiber::unused_stacks() {
  static std::vector<Stack> stacks;
  return stacks;
}

Fiber::Stack Fiber::take_stack() {
  constexpr size_t kStacksAtOnce = 64;
  const std::lock_guard lock(unused_stacks_mutex);
  std::vector<Stack>& unused = unused_stacks();
  if (unused.empty()) {
    void* memory = mmap(nullptr, kStacksAtOnce * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    for (size_t i = kStacksAtOnce; i-- > 0;) {
      // Not all tops in the same sets of the caches.
      const size_t bytes = kStackBytes - i * 15 * 64;
      unused.push_back({static_cast<std::byte*>(memory) + i * kStackBytes, nullptr, bytes});
    }
  }
  Stack stack = unused.back();
  unused.pop_back();
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  if (stack.tsan_fiber == nullptr) stack.tsan_fiber = __tsan_create_fiber(0);
#endif
  return stack;
}

Fiber::~Fiber() {
  if (stack_.memory == nullptr) return;
  const std::lock_guard lock(unused_stacks_mutex);
  unused_stacks().push_back(stack_);
}

void Fiber::start(void (*entry)()) {
  if (stack_.memory == nullptr) {
    stack_ = take_stack();
    tsan_fiber_ = stack_.tsan_fiber;
    bottom_ = stack_.memory;
    bytes_ = stack_.bytes;
  }
  unpoison(stack_.memory, stack_.bytes);  // what the last run left poisoned
#if defined(__x86_64__)
  // As the switch leaves a stack: the registers, the address to return to, and for `entry` (which
  // must find the stack pointer 8 off a multiple of 16) a null return address.
  void** top = reinterpret_cast<void**>(stack_.memory + stack_.bytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.memory;
  context_.uc_stack.ss_size = stack_.bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#endif
}

void Fiber::adopt_os_thread() {
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  tsan_fiber_ = __tsan_get_current_fiber();
#endif
}

void Fiber::switch_to(Fiber& from, Fiber& to, [[maybe_unused]] bool from_ends) {
#if defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
  previous = &from;
  running = &to;
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.fake_stack_, to.bottom_, to.bytes_);
#endif
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  __tsan_switch_to_fiber(to.tsan_fiber_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
  cuda_on_host_switch_stack(&from.stack_pointer_, to.stack_pointer_);
#else
  swapcontext(&from.context_, &to.context_);
#endif
  entered();
}

void Fiber::publish_abandoned([[maybe_unused]] void* token) {
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  void* self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(tsan_fiber_, __tsan_switch_to_fiber_no_sync);
  __tsan_release(token);
  __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
#endif
}

void Fiber::entered() {
#if defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
  // The stack that was left is known from here on: the OS thread's is not before.
  __sanitizer_finish_switch_fiber(running->fake_stack_, &previous->bottom_, &previous->bytes_);
  running->fake_stack_ = nullptr;
#endif
}

}  // namespace cuda_on_host
