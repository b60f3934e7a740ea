#include "core/isa.h"

#include <atomic>
#include <cstdlib>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "core/check.h"

namespace vllm_lite {
namespace {

constexpr Isa kIsas[kNumIsas] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16,
                                 Isa::kAmx};

// Linux lets a process use the tile registers after it has asked; threads inherit it.
bool may_use_amx() {
#if defined(__x86_64__)
  constexpr unsigned kLeaf = 7, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(kLeaf, 0, &a, &b, &c, &d)) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Isa isa_from_environment() {
  const char* wanted = std::getenv("VLLM_LITE_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return best_isa();
  std::string names;
  for (Isa isa : kIsas) {
    names += std::string(names.empty() ? "" : ", ") + isa_name(isa);
    if (std::string(wanted) != isa_name(isa)) continue;
    VL_CHECK(isa <= best_isa(), "VLLM_LITE_CPU_ISA=" + std::string(wanted) +
                                    ": this processor supports at most " + isa_name(best_isa()));
    return isa;
  }
  throw Error("VLLM_LITE_CPU_ISA=" + std::string(wanted) + ": must be one of " + names);
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
    if (!has_avx2) return Isa::kPortable;
    if (!has_avx512) return Isa::kAvx2;
    const bool has_bf16 =
        __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (!has_bf16) return Isa::kAvx512;
    return may_use_amx() ? Isa::kAmx : Isa::kAvx512Bf16;
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
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kAmx:
      return "amx";
  }
  return "unknown";
}

}  // namespace vllm_lite
