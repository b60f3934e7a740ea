// Barriers of the block, and memory fences.
#pragma once

#include <cstdint>

namespace cuda_on_host {

// bar.sync / bar.arrive: `threads` in all, a multiple of the warp size. barrier_sync returns how
// many came with a true predicate.
uint32_t barrier_sync(uint32_t id, uint32_t threads, bool predicate = false);
void barrier_arrive(uint32_t id, uint32_t threads);
// The barrier of all threads of the block.
uint32_t block_barrier(bool predicate, const char* name);

void fence_block();
void fence_device();

}  // namespace cuda_on_host

inline void __syncthreads() { ::cuda_on_host::block_barrier(false, "__syncthreads()"); }
inline int __syncthreads_count(int predicate) {
  return static_cast<int>(::cuda_on_host::block_barrier(predicate != 0, "__syncthreads_count()"));
}
inline int __syncthreads_or(int predicate) {
  return ::cuda_on_host::block_barrier(predicate != 0, "__syncthreads_or()") != 0;
}
inline int __syncthreads_and(int predicate) {
  return ::cuda_on_host::block_barrier(predicate == 0, "__syncthreads_and()") == 0;
}

inline void __threadfence_block() { ::cuda_on_host::fence_block(); }
inline void __threadfence() { ::cuda_on_host::fence_device(); }
