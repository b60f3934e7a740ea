// Launching a kernel: its blocks run on the cores, each to its end, in no order a kernel may rely
// on; returns when all have ended.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include "cuda_on_host/language.h"
#include "cuda_on_host/options.h"

namespace cuda_on_host {

// Without permission a kernel gets this much shared memory, static and dynamic together.
inline constexpr int kDefaultSharedBytes = 48 << 10;

// Bytes that a block may use on a device of the options' compute capability.
int max_dynamic_shared_bytes();
void allow_dynamic_shared(const void* kernel, int bytes);
int blocks_per_multiprocessor(int threads, int dynamic_shared_bytes);

void launch_blocks(const void* kernel, dim3 grid, dim3 block, size_t dynamic_shared_bytes,
                   const std::function<void()>& thread_body);

// Throws LaunchError for what a device refuses, KernelError for what a kernel did.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_shared_bytes,
            Arguments&&... arguments) {
  const std::tuple<Parameters...> parameters(std::forward<Arguments>(arguments)...);
  launch_blocks(reinterpret_cast<const void*>(kernel), grid, block, dynamic_shared_bytes,
                [&] { std::apply(kernel, parameters); });
}

}  // namespace cuda_on_host
