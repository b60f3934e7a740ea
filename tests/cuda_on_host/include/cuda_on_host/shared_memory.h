// Shared memory of the running block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_host {

// The block's storage of the static variable that `key` stands for. NaN at first.
void* static_shared(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();
// Offset in shared memory, as the instructions take it. An address elsewhere is an error.
uint32_t shared_address(const void* p);

}  // namespace cuda_on_host

// `type name extents` in shared memory, as a reference. The lambda makes a key of its own for each
// use and each instantiation of a template around it.
#define CUDA_ON_HOST_SHARED(type, name, ...)                                    \
  auto& name = *static_cast<type(*) __VA_ARGS__>(::cuda_on_host::static_shared( \
      [] {                                                                      \
        static char key;                                                        \
        return &key;                                                            \
      }(),                                                                      \
      sizeof(type __VA_ARGS__), alignof(type)))
