// Launches, shared memory and what a launcher asks of the device.
#include <array>
#include <cmath>

#include "kernel_test.h"

namespace {

using namespace vllm_lite::device;

class Launch : public KernelTest {};

__global__ void record_indices(std::array<unsigned, 3>* threads, std::array<unsigned, 3>* blocks) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned size = blockDim.x * blockDim.y * blockDim.z;
  threads[block * size + thread] = {threadIdx.x, threadIdx.y, threadIdx.z};
  blocks[block * size + thread] = {blockIdx.x, blockIdx.y, blockIdx.z};
}

TEST_F(Launch, EveryThreadOfEveryBlockRunsOnce) {
  const dim3 grid(3, 2, 4), block(5, 3, 7);
  const size_t total = 3 * 2 * 4 * 5 * 3 * 7;
  std::vector<std::array<unsigned, 3>> threads(total, {99, 99, 99}), blocks(total, {99, 99, 99});
  VL_LAUNCH(record_indices, grid, block, 0, 0, threads.data(), blocks.data());
  size_t i = 0;
  for (unsigned bz = 0; bz < grid.z; ++bz)
    for (unsigned by = 0; by < grid.y; ++by)
      for (unsigned bx = 0; bx < grid.x; ++bx)
        for (unsigned tz = 0; tz < block.z; ++tz)
          for (unsigned ty = 0; ty < block.y; ++ty)
            for (unsigned tx = 0; tx < block.x; ++tx, ++i) {
              ASSERT_EQ(threads[i], (std::array<unsigned, 3>{tx, ty, tz}));
              ASSERT_EQ(blocks[i], (std::array<unsigned, 3>{bx, by, bz}));
            }
}

template <typename T>
__global__ void template_kernel(const __grid_constant__ std::array<T, 2> pair, T* out) {
  *out = pair[0] + pair[1];
}

TEST_F(Launch, TemplatesAndStructsByValue) {
  float sum = 0;
  VL_LAUNCH((template_kernel<float>), 1, 1, 0, 0, (std::array<float, 2>{1.5f, 2.0f}), &sum);
  EXPECT_EQ(sum, 3.5f);
}

__global__ void empty_kernel() {}

template <typename F>
std::string refusal_of(F&& run) {
  try {
    run();
  } catch (const vllm_lite::Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(Launch, WhatADeviceRefusesIsRefused) {
  const auto refusal = [](dim3 grid, dim3 block, size_t shared) {
    return refusal_of([&] { VL_LAUNCH(empty_kernel, grid, block, shared, 0); });
  };
  EXPECT_EQ(refusal(1, 1024, 48 << 10), "");
  EXPECT_CONTAINS(refusal(1, 1025, 0), "empty_kernel: invalid launch: a block of 1025 x 1 x 1");
  EXPECT_CONTAINS(refusal(1, 0, 0), "a block of 0 x 1 x 1 threads");
  EXPECT_CONTAINS(refusal(0, 32, 0), "a grid of 0 x 1 x 1 blocks");
  EXPECT_CONTAINS(refusal(dim3(1, 65536), 32, 0), "a grid of 1 x 65536 x 1 blocks");
  EXPECT_CONTAINS(refusal(1, 32, (48 << 10) + 1),
                  "49153 bytes of dynamic shared memory; 49152 are allowed");
}

__global__ void large_kernel() {}

TEST_F(Launch, MoreSharedMemoryOnlyWithPermission) {
  cuda_on_host::options().compute_capability = 80;
  EXPECT_EQ(max_dynamic_shared_bytes(), 163 << 10);
  const auto run = [](int bytes) {
    return refusal_of([bytes] { VL_LAUNCH(large_kernel, 1, 32, bytes, 0); });
  };
  EXPECT_CONTAINS(run(100 << 10), "are allowed");
  allow_dynamic_shared(large_kernel, 100 << 10);
  EXPECT_EQ(run(100 << 10), "");
  EXPECT_CONTAINS(run((100 << 10) + 16), "are allowed");
  EXPECT_CONTAINS(refusal_of([] { allow_dynamic_shared(large_kernel, (163 << 10) + 1); }),
                  "a block may use 166912");
}

TEST_F(Launch, TheDeviceIsWhatTheOptionsSay) {
  cuda_on_host::options().num_multiprocessors = 132;
  EXPECT_EQ(num_multiprocessors(), 132);
  EXPECT_EQ(blocks_per_multiprocessor(empty_kernel, 256, 0), 8);
  EXPECT_EQ(blocks_per_multiprocessor(empty_kernel, 32, 0), 32);
  for (const auto& [capability, kibibytes, blocks] :
       std::vector<std::array<int, 3>>{{80, 163, 3}, {86, 99, 1}, {90, 227, 4}, {120, 99, 1}}) {
    cuda_on_host::options().compute_capability = capability;
    EXPECT_EQ(max_dynamic_shared_bytes(), kibibytes << 10);
    EXPECT_EQ(blocks_per_multiprocessor(empty_kernel, 128, 50 << 10), blocks);
  }
}

TEST_F(Launch, CopiesAndFills) {
  int from[4] = {1, 2, 3, 4}, to[4] = {};
  copy_async(to, from, sizeof(from), 0);
  EXPECT_EQ(to[3], 4);
  fill_async(to, 0xff, 8, 0);
  EXPECT_EQ(to[1], -1);
  EXPECT_EQ(to[2], 3);
}

// ---- shared memory

template <int kSize>
__device__ float* scratch() {
  VL_SHARED(float, values, [kSize]);
  return values;
}

struct Addresses {
  float *first, *second, *again, *other_size;
  void* dynamic;
  bool fresh;
};

__global__ void look_at_shared(Addresses* out) {
  VL_DYNAMIC_SHARED(float, dynamic);
  VL_SHARED(float, first, [3][4]);
  VL_SHARED(float, second, );
  bool fresh = std::isnan(second) && std::isnan(dynamic[threadIdx.x]);
  for (const auto& row : first) {
    for (const float x : row) fresh = fresh && std::isnan(x);
  }
  __syncthreads();
  if (threadIdx.x == 0) first[2][3] = second = 1.0f;
  dynamic[threadIdx.x] = 2.0f;
  static_assert(sizeof(first) == 48);
  out[blockIdx.x * blockDim.x + threadIdx.x] = {&first[0][0], &second, scratch<8>(),
                                                scratch<9>(), dynamic, fresh};
}

TEST_F(Launch, SharedVariablesAreTheBlocksAndNaNAtFirst) {
  cuda_on_host::options().workers = 1;
  for_each_order([] {
    std::vector<Addresses> out(6 * 64);
    VL_LAUNCH(look_at_shared, 6, 64, 64 * sizeof(float), 0, out.data());
    for (const Addresses& a : out) {
      EXPECT_TRUE(a.fresh);
      EXPECT_NE(a.first, a.second);
      EXPECT_NE(a.again, a.other_size);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(a.dynamic) % 1024, 0);
    }
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i].first, out[i / 64 * 64].first);
  });
}

__global__ void use_too_much() {
  VL_SHARED(float, values, [8 << 10]);
  values[0] = 1;
}

TEST_F(Launch, StaticAndDynamicSharedMemoryTogetherAreLimited) {
  EXPECT_EQ(error_of([] { VL_LAUNCH(use_too_much, 1, 1, 16 << 10, 0); }), "");
  const std::string error = error_of([] { VL_LAUNCH(use_too_much, 1, 1, 17 << 10, 0); });
  EXPECT_CONTAINS(error, "too much shared memory: 32768 static and 17408 dynamic bytes");
}

__global__ void use_static_beside_dynamic() {
  VL_SHARED(float, values, [8 << 10]);
  values[0] = 1;
}

TEST_F(Launch, ThePermissionForDynamicSharedMemoryLeavesRoomForStatic) {
  cuda_on_host::options().compute_capability = 90;
  allow_dynamic_shared(use_static_beside_dynamic, 100 << 10);
  EXPECT_EQ(error_of([] { VL_LAUNCH(use_static_beside_dynamic, 1, 1, 100 << 10, 0); }), "");
}

__global__ void address_of_global(int* p, uint32_t* out) { *out = shared_address(p); }

TEST_F(Launch, SharedAddressOfGlobalMemoryIsAnError) {
  int x = 0;
  uint32_t address = 0;
  EXPECT_CONTAINS(error_of([&] { VL_LAUNCH(address_of_global, 1, 1, 0, 0, &x, &address); }),
                  "must be in shared memory");
}

__global__ void fail_in_block_5() {
  if (blockIdx.x == 5 && threadIdx.x == 2) __trap();
  __syncthreads();
}

TEST_F(Launch, AfterAnErrorTheNextLaunchIsClean) {
  EXPECT_CONTAINS(error_of([] { VL_LAUNCH(fail_in_block_5, 8, 32, 0, 0); }),
                  "[block (5,0,0) thread (2,0,0)]");
  EXPECT_EQ(error_of([] { VL_LAUNCH(fail_in_block_5, 5, 32, 0, 0); }), "");
}

}  // namespace
