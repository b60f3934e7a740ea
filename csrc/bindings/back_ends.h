// Under which names and for which devices a binding file registers its ops.
//
// A file defines a macro VL_X_OPS(back_end) of m.impl(...) lines, where back_end is cpu or cuda,
// and gives it to VL_IMPLEMENT_OPS:
//   _ops.so                the CPU kernels for CPU tensors and, where nvcc was there
//                          (VL_WITH_CUDA), the CUDA kernels for CUDA tensors
//   _ops_cuda_on_host.so   (VL_CUDA_ON_HOST, tests only) the CUDA kernels for CPU tensors, run on
//                          the host layer, in a library of its own name
#pragma once

#include <torch/csrc/stable/library.h>

#if defined(VL_CUDA_ON_HOST)
#define VL_OPS vllm_lite_cuda_on_host
#define VL_IMPLEMENT_OPS(ops) \
  STABLE_TORCH_LIBRARY_IMPL(VL_OPS, CPU, m) { ops(cuda) }
#elif defined(VL_WITH_CUDA)
#define VL_OPS vllm_lite
#define VL_IMPLEMENT_OPS(ops)                                                                      \
  STABLE_TORCH_LIBRARY_IMPL(VL_OPS, CPU, m){ops(cpu)} STABLE_TORCH_LIBRARY_IMPL(VL_OPS, CUDA, m) { \
    ops(cuda)                                                                                      \
  }
#else
#define VL_OPS vllm_lite
#define VL_IMPLEMENT_OPS(ops) \
  STABLE_TORCH_LIBRARY_IMPL(VL_OPS, CPU, m) { ops(cpu) }
#endif
