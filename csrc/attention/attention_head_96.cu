#include "attention/attention_launch.cuh"

namespace vllm_lite {
namespace attention {

template void launch_items<BFloat16, BFloat16, 96>(const KernelArgs& args);
template void launch_items<Float16, Float16, 96>(const KernelArgs& args);

}  // namespace attention
}  // namespace vllm_lite
