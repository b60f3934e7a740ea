#include "cuda_on_host/barriers.h"

#include <bit>
#include <string>

#include "cuda_on_host/block.h"
#include "sanitizers.h"

namespace cuda_on_host {
namespace {

char device_fence_order;

void release_waiting(Block& block, Barrier& barrier) {
  for (uint32_t i = 0; i < block.num_warps; ++i) {
    for (uint32_t lanes = barrier.waiting[i]; lanes != 0; lanes &= lanes - 1) {
      make_ready(*block.warps[i].threads[std::countr_zero(lanes)]);
    }
    barrier.waiting[i] = 0;
  }
}

// Returns whether this was the last arrival.
bool arrive(Block& block, Barrier& barrier, uint32_t threads, bool predicate, const char* name) {
  ++block.num_barriers;
  if (barrier.arrived != 0 && barrier.expected != threads) {
    fail(std::string(name) + ": threads of one barrier disagree about how many it is for: " +
         std::to_string(threads) + " and " + std::to_string(barrier.expected));
  }
  const uint32_t phase = barrier.phase & 1;
  publish(&barrier.order[phase]);
  if (barrier.arrived == 0) barrier.true_predicates[phase] = 0;
  barrier.expected = threads;
  barrier.true_predicates[phase] += predicate;
  if (++barrier.arrived < threads) return false;
  barrier.arrived = 0;
  ++barrier.phase;
  release_waiting(block, barrier);
  return true;
}

uint32_t arrive_and_wait(Barrier& barrier, uint32_t threads, bool predicate, const char* name) {
  Block& block = *current.block;
  const uint32_t phase = barrier.phase & 1;
  if (arrive(block, barrier, threads, predicate, name)) {
    scheduling_point();
  } else {
    const Thread& thread = *current.thread;
    barrier.waiting[thread.warp] |= 1u << thread.lane;
    wait_at(name);
  }
  observe(&barrier.order[phase]);
  return barrier.true_predicates[phase];
}

Barrier& named_barrier(uint32_t id, uint32_t threads) {
  if (id >= kNumBarriers) fail("barrier " + std::to_string(id) + " does not exist");
  if (threads == 0 || threads % kWarpSize != 0 || threads > current.block->num_threads) {
    fail("a barrier of " + std::to_string(threads) + " threads in a block of " +
         std::to_string(current.block->num_threads) + ": must be whole warps of the block");
  }
  return current.block->barriers[id];
}

}  // namespace

uint32_t barrier_sync(uint32_t id, uint32_t threads, bool predicate) {
  return arrive_and_wait(named_barrier(id, threads), threads, predicate, "barrier_sync()");
}

void barrier_arrive(uint32_t id, uint32_t threads) {
  arrive(*current.block, named_barrier(id, threads), threads, false, "barrier_arrive()");
}

uint32_t block_barrier(bool predicate, const char* name) {
  Block& block = *current.block;
  if (block.live != block.num_threads) {
    fail(std::string(name) + " after " + std::to_string(block.num_threads - block.live) +
         " threads of the block returned");
  }
  return arrive_and_wait(block.barriers[0], block.num_threads, predicate, name);
}

void fence_block() {
  observe(&current.block->fence_order);
  publish(&current.block->fence_order);
}

void fence_device() {
  observe(&device_fence_order);
  publish(&device_fence_order);
  fence_block();
}

}  // namespace cuda_on_host
