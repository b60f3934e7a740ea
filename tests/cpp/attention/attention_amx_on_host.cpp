// paged_attention_isa.cpp as it is compiled for AMX, under a namespace of its own and with the tile
// instructions in software.
#include "../core/amx_on_host.h"
#include "attention/attention_work.h"

namespace vllm_lite::amx_on_host_kernels {
void attend_item(const AttentionCall& call);
void merge_item(const AttentionCall& call);
}  // namespace vllm_lite::amx_on_host_kernels

#define VL_ISA amx_on_host_kernels
#define VL_ISA_amx 1
#include "attention/paged_attention_isa.cpp"
