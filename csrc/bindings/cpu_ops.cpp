// What exists on the CPU only: decoding of GGUF blocks, the choice of the instruction set, and
// torch's threads for our kernels.
#include <torch/csrc/stable/library.h>

#include "bindings/op_args.h"
#include "core/isa.h"
#include "core/parallel_for.h"
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

// Our kernels and torch's share torch's pool.
void parallel_in_torch(int64_t count, int64_t grain, const void* context, ParallelBody body) {
  torch::stable::parallel_for(0, count, grain,
                              [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

const bool parallel_backend_installed = (set_parallel_backend(parallel_in_torch), true);

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_lite, m) {
  m.def("dequantize(Tensor(a!) out, Tensor blocks, int ggml_type) -> ()");
  m.def("best_cpu_isa() -> int");
  m.def("current_cpu_isa() -> int");
  m.def("set_cpu_isa(int isa) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CPU, m) { m.impl("dequantize", TORCH_BOX(&dequantize)); }

STABLE_TORCH_LIBRARY_IMPL(vllm_lite, CompositeExplicitAutograd, m) {
  m.impl("best_cpu_isa", TORCH_BOX(&best_cpu_isa));
  m.impl("current_cpu_isa", TORCH_BOX(&current_cpu_isa));
  m.impl("set_cpu_isa", TORCH_BOX(&set_cpu_isa));
}

}  // namespace
}  // namespace vllm_lite
