// linear_isa.cpp as it is compiled for AMX, under a namespace of its own and with the tile
// instructions in software.
#include "../core/amx_on_host.h"
#include "ops/linear_kernels.h"

namespace vllm_lite::amx_on_host_kernels {
extern const LinearKernels kLinearKernels;
}

#define VL_ISA amx_on_host_kernels
#define VL_ISA_amx 1
#include "ops/linear_isa.cpp"
