#include "cuda_on_host/fiber.h"

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
// The fiber that the OS thread left last.
constinit thread_local Fiber* previous = nullptr;
constinit thread_local Fiber* running = nullptr;
}  // namespace

Fiber::~Fiber() {
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  if (owns_tsan_fiber_) __tsan_destroy_fiber(tsan_fiber_);
#endif
}

void Fiber::start(std::byte* stack, size_t bytes, void (*entry)()) {
  unpoison(stack, bytes);
  stack_ = stack;
  stack_bytes_ = bytes;
#if defined(__x86_64__)
  // As the switch leaves a stack: the registers, the address to return to, and for `entry` (which
  // must find the stack pointer 8 off a multiple of 16) a null return address.
  void** top = reinterpret_cast<void**>(stack + bytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  stack_pointer_ = top;
#else
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#endif
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  if (!owns_tsan_fiber_) tsan_fiber_ = __tsan_create_fiber(0);
  owns_tsan_fiber_ = true;
#endif
}

void Fiber::adopt_os_thread() {
#if defined(CUDA_ON_HOST_THREAD_SANITIZER)
  tsan_fiber_ = __tsan_get_current_fiber();
#endif
}

void Fiber::switch_to(Fiber& from, Fiber& to, [[maybe_unused]] bool from_ends) {
  previous = &from;
  running = &to;
#if defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.fake_stack_, to.stack_,
                                 to.stack_bytes_);
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

void Fiber::entered() {
#if defined(CUDA_ON_HOST_ADDRESS_SANITIZER)
  // The stack that was left is known from here on: the OS thread's is not before.
  __sanitizer_finish_switch_fiber(running->fake_stack_, &previous->stack_, &previous->stack_bytes_);
  running->fake_stack_ = nullptr;
#endif
}

}  // namespace cuda_on_host
