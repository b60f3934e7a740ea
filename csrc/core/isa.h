// Run-time choice of the CPU instruction set.
//
// A kernel source named *_isa.cpp is compiled once per instruction set (cmake/isa.cmake) with
// VL_ISA set to `portable`, `avx2` or `avx512`, and puts its entry points into
// namespace vllm_lite::VL_ISA; one that has something to gain from them also for `avx512_bf16`
// (which has VNNI) and `amx`, which use the others' `avx512` copy. It must define nothing with
// vague linkage (no std:: templates or inline functions that the compiler could emit out of line):
// the linker may keep the AVX-512 copy for everybody. A test looks for weak symbols in those
// objects.
#pragma once

#include <cstdint>

namespace vllm_lite {

// In ascending order: a processor that has one has those before it.
enum class Isa : int32_t { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };
constexpr int32_t kNumIsas = 5;

// The best set this processor and operating system support. Asks the system, once, to let this
// process use AMX.
Isa best_isa();
// The set in use: best_isa(), or what VLLM_LITE_CPU_ISA=<isa_name> asks for.
// Throws Error if that name is unknown or the processor lacks it.
Isa current_isa();
// For tests and benchmarks. Throws Error if the processor lacks it.
void set_isa(Isa isa);
const char* isa_name(Isa isa);

}  // namespace vllm_lite

// Declares void name(const Params&) in each instruction set's namespace; VL_DISPATCH_ISA calls the
// current one's.
#define VL_DECLARE_ISA_KERNEL(name, Params) \
  namespace portable {                      \
  void name(const Params& params);          \
  }                                         \
  namespace avx2 {                          \
  void name(const Params& params);          \
  }                                         \
  namespace avx512 {                        \
  void name(const Params& params);          \
  }

#define VL_DISPATCH_ISA(name, params) \
  switch (current_isa()) {            \
    case Isa::kPortable:              \
      return portable::name(params);  \
    case Isa::kAvx2:                  \
      return avx2::name(params);      \
    case Isa::kAvx512:                \
    case Isa::kAvx512Bf16:            \
    case Isa::kAmx:                   \
      return avx512::name(params);    \
  }
