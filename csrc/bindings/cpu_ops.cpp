// What exists on the CPU only: decoding of GGUF blocks, the choice of the instruction set, and
// how many threads the kernels have.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "bindings/op_args.h"
#include "core/isa.h"
#include "core/thread_pool.h"
#include "ops/ops.h"

namespace vllm_lite {
namespace {

void dequantize(Tensor out, Tensor blocks, int64_t ggml_type) {
  constexpr const char* kOp = "dequantize";
  check(out.is_contiguous(), kOp, "out must be contiguous");
  DequantizeParams params{};
  params.out = out.mutable_data_ptr();
  params.blocks = byte_data(blocks, kOp, "blocks");
  params.num_elements = out.numel();
  params.type = static_cast<GgmlType>(ggml_type);
  params.dtype = float_dtype(out, kOp);
  const int64_t expected = dequantize_block_bytes(params.type, params.num_elements);
  check(blocks.numel() == expected, kOp, "blocks does not hold out's number of elements");
  dequantize_cpu(params);
}

int64_t best_cpu_isa() { return static_cast<int64_t>(best_isa()); }
int64_t current_cpu_isa() { return static_cast<int64_t>(current_isa()); }
void set_cpu_isa(int64_t isa) {
  VL_CHECK(isa >= 0 && isa < kNumIsas, "set_cpu_isa: is " + std::to_string(isa) +
                                           ", must be from 0 to " + std::to_string(kNumIsas - 1));
  set_isa(static_cast<Isa>(isa));
}

void use_threads(int64_t num_threads) {
  VL_CHECK(num_threads >= 1 && num_threads <= 4096, "set_num_threads: must be 1 to 4096");
  set_num_threads(static_cast<int>(num_threads));
}

bool pin_threads_to(std::vector<int64_t> cpus) {
  return pin_threads(std::vector<int>(cpus.begin(), cpus.end()));
}

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_lite, m) {
  m.def("dequantize(Tensor(a!) out, Tensor blocks, int ggml_type) -> ()");
  m.def("best_cpu_isa() -> int");
  m.def("current_cpu_isa() -> int");
  m.def("set_cpu_isa(int isa) -> ()");
  m.def("set_num_threads(int num_threads) -> ()");
  m.def("pin_threads(int[] cpus) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CPU, m) { m.impl("dequantize", TORCH_BOX(&dequantize)); }

STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CompositeExplicitAutograd, m) {
  m.impl("best_cpu_isa", TORCH_BOX(&best_cpu_isa));
  m.impl("current_cpu_isa", TORCH_BOX(&current_cpu_isa));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
  m.impl("set_num_threads", TORCH_BOX(&use_threads));
  m.impl("pin_threads", TORCH_BOX(&pin_threads_to));
}

}  // namespace
}  // namespace vllm_lite
