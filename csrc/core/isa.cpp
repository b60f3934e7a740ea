#include "core/isa.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include "core/check.h"

namespace vllm_lite {
namespace {

Isa isa_from_environment() {
  const char* wanted = std::getenv("VLLM_LITE_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return best_isa();
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (std::string(wanted) != isa_name(isa)) continue;
    VL_CHECK(isa <= best_isa(), "VLLM_LITE_CPU_ISA=" + std::string(wanted) +
                                    ": this processor supports at most " + isa_name(best_isa()));
    return isa;
  }
  throw Error("VLLM_LITE_CPU_ISA=" + std::string(wanted) +
              ": must be one of portable, avx2, avx512");
}

// -1: not chosen yet.
std::atomic<int32_t> chosen_isa{-1};

}  // namespace

Isa best_isa() {
  // __builtin_cpu_supports also asks the operating system (XGETBV) for the wider registers.
  static const Isa best = [] {
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (has_avx2 && has_avx512) return Isa::kAvx512;
    return has_avx2 ? Isa::kAvx2 : Isa::kPortable;
  }();
  return best;
}

Isa current_isa() {
  const int32_t chosen = chosen_isa.load(std::memory_order_relaxed);
  if (chosen >= 0) return static_cast<Isa>(chosen);
  const Isa isa = isa_from_environment();
  chosen_isa.store(static_cast<int32_t>(isa));
  return isa;
}

void set_isa(Isa isa) {
  VL_CHECK(isa <= best_isa(), std::string("instruction set ") + isa_name(isa) +
                                  ": this processor supports at most " + isa_name(best_isa()));
  chosen_isa.store(static_cast<int32_t>(isa));
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace vllm_lite
