// The attention kernels of cuda_random_part_test; see CMakeLists.txt.
#include "attention/attention_launch.cuh"

namespace vllm_lite {
namespace attention {

template void launch_items<BFloat16, BFloat16, 64>(const KernelArgs& args);
template void launch_items<Float16, Float8E4M3, 64>(const KernelArgs& args);

}  // namespace attention
}  // namespace vllm_lite
