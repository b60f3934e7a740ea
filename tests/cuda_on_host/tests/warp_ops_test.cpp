#include <gtest/gtest.h>

#include <vector>

#include "core/device.h"

namespace {

__global__ void sum_warp(float* out) {
  float x = static_cast<float>(threadIdx.x);
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  VL_SHARED(float, sums, [8]);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (unsigned i = 0; i < blockDim.x / 32; ++i) total += sums[i];
    out[blockIdx.x] = total;
  }
}

TEST(WarpOps, Sum) {
  std::vector<float> out(5);
  VL_LAUNCH(sum_warp, 5, 256, 0, 0, out.data());
  for (float x : out) EXPECT_EQ(x, 255 * 128);
}

}  // namespace
