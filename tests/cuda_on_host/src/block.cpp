#include "cuda_on_host/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>

#include "cuda_on_host/options.h"
#include "sanitizers.h"

namespace cuda_on_host {

constinit thread_local Current current{nullptr, nullptr};

namespace {

std::string coordinates(uint3 index) {
  return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," +
         std::to_string(index.z) + ")";
}

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t x = state += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// The number of a set bit of `mask`: a random one under a seed, else the first from `first` on,
// around.
uint32_t pick(Block& block, uint32_t mask, uint32_t first) {
  if (options().seed != 0) {
    uint64_t skip = next_random(block.random_state) % std::popcount(mask);
    while (skip-- > 0) mask &= mask - 1;
    return std::countr_zero(mask);
  }
  const uint32_t rest = first < kWarpSize ? mask & ~0u << first : 0;
  return std::countr_zero(rest != 0 ? rest : mask);
}

void clear_ready(Block& block, Thread& thread) {
  Warp& warp = block.warps[thread.warp];
  warp.ready &= ~(1u << thread.lane);
  if (warp.ready == 0) block.ready_warps &= ~(1u << thread.warp);
}

Thread& take_next_ready(Block& block) {
  const Thread* thread = current.thread;
  const bool stay = options().seed == 0 && (block.ready_warps >> block.current_warp & 1) != 0;
  if (!stay) block.current_warp = pick(block, block.ready_warps, block.current_warp + 1);
  Warp& warp = block.warps[block.current_warp];
  const bool same_warp = thread != nullptr && thread->warp == block.current_warp;
  Thread& next = *warp.threads[pick(block, warp.ready, same_warp ? thread->lane + 1 : 0)];
  clear_ready(block, next);
  return next;
}

[[noreturn]] void fail_for_deadlock(Block& block) {
  constexpr int kNamed = 6;
  std::string what = "deadlock: no thread can go on;";
  const Thread* first = nullptr;
  int waiting = 0;
  for (uint32_t i = 0; i < block.num_threads; ++i) {
    const Thread& thread = block.threads[i];
    if (thread.done) continue;
    if (first == nullptr) first = &thread;
    if (waiting++ < kNamed)
      what += " " + coordinates(thread.index) + " at " + thread.waits_at + ",";
  }
  what.back() = waiting > kNamed ? ' ' : ';';
  what += "waiting: " + std::to_string(waiting) + " of " + std::to_string(block.num_threads);
  for (const MBarrier& barrier : block.mbarriers) {
    if (barrier.waiting.empty()) continue;
    what += "; an mbarrier lacks " + std::to_string(barrier.missing) + " arrivals and expects " +
            std::to_string(barrier.expected_bytes) + " bytes, of which " +
            std::to_string(barrier.pending_bytes) + " are being copied";
  }
  fail(what, *first);
}

// Leaves the running thread, which is not ready, for another one.
void run_others() {
  Block& block = *current.block;
  Thread& from = *current.thread;
  if (block.ready_warps == 0) fail_for_deadlock(block);
  Thread& to = take_next_ready(block);
  if (&to == &from) return;
  ++block.num_switches;
  current.thread = &to;
  Fiber::switch_to(from.fiber, to.fiber, from.done);
}

void yield() {
  make_ready(*current.thread);
  run_others();
}

bool all_arrived(const Warp& warp, const Warp::Meeting& meeting) {
  return meeting.arrived == (meeting.mask & warp.members & ~warp.exited);
}

void complete(Warp& warp, Warp::Meeting& meeting) {
  const Warp::Meeting met = meeting;
  meeting = {};
  met.collective->complete(warp, met.arrived);
  for (uint32_t lanes = met.arrived; lanes != 0; lanes &= lanes - 1) {
    Thread& thread = *warp.threads[std::countr_zero(lanes)];
    if (&thread != current.thread) make_ready(thread);
  }
}

Warp::Meeting& find_meeting(Warp& warp, const Collective& collective, uint32_t mask) {
  Warp::Meeting* free = nullptr;
  for (Warp::Meeting& meeting : warp.meetings) {
    if (meeting.collective == nullptr) {
      // Used from the front: behind a free slot there may still be one in use.
      if (free == nullptr) free = &meeting;
      if (&meeting - warp.meetings >= warp.slots_used) break;
      continue;
    }
    if ((meeting.mask & mask) == 0) continue;
    if (meeting.collective != &collective) {
      fail(std::string("divergence: lanes of one warp are at ") + collective.name + " and " +
           meeting.collective->name);
    }
    if (meeting.mask != mask) {
      fail(std::string("divergence: lanes of one warp are at ") + collective.name +
           " under different masks");
    }
    return meeting;
  }
  *free = {&collective, mask, 0, &warp.order[warp.num_meetings++ % sizeof(warp.order)]};
  warp.slots_used = std::max<long>(warp.slots_used, free - warp.meetings + 1);
  return *free;
}

void end_thread(Block& block, Thread& thread) {
  if (!thread.copies.copies.empty()) fail("the thread returned with cp.async copies in flight");
  thread.done = true;
  --block.live;
  for (const Barrier& barrier : block.barriers) {
    if (barrier.arrived != 0 && barrier.expected == block.num_threads) {
      fail("the thread returned while others wait for it at __syncthreads()");
    }
  }
  Warp& warp = block.warps[thread.warp];
  warp.exited |= 1u << thread.lane;
  for (Warp::Meeting& meeting : warp.meetings) {
    if (meeting.collective != nullptr && all_arrived(warp, meeting)) complete(warp, meeting);
  }
}

void thread_main() {
  Fiber::entered();
  Block& block = *current.block;
  Thread& thread = *current.thread;
  try {
    observe(&block);
    block.kernel();
    publish(&block);
    end_thread(block, thread);
    if (block.live != 0) run_others();
  } catch (...) {
    block.error = std::current_exception();
  }
  Fiber::switch_to(thread.fiber, block.os_thread, /*from_ends=*/true);
}

}  // namespace

Block::Block(const std::function<void()>& kernel_, dim3 grid_, dim3 dim_,
             uint32_t dynamic_shared_bytes, uint32_t shared_limit)
    : kernel(kernel_),
      grid(grid_),
      dim(dim_),
      num_threads(dim_.x * dim_.y * dim_.z),
      num_warps((num_threads + kWarpSize - 1) / kWarpSize),
      threads(new Thread[num_threads]),
      warps(new Warp[num_warps]),
      shared(dynamic_shared_bytes, shared_limit) {
  void* memory = mmap(nullptr, num_threads * options().stack_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  stacks = static_cast<std::byte*>(memory);
  for (uint32_t i = 0; i < num_threads; ++i) {
    Thread& thread = threads[i];
    thread.index = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
    thread.lane = i % kWarpSize;
    thread.warp = i / kWarpSize;
    warps[thread.warp].threads[thread.lane] = &thread;
    warps[thread.warp].members |= 1u << thread.lane;
  }
}

Block::~Block() {
  unpoison(stacks, num_threads * options().stack_bytes);
  munmap(stacks, num_threads * options().stack_bytes);
}

void Block::run(uint3 block_index, uint64_t seed) {
  index = block_index;
  random_state = seed;
  live = num_threads;
  ready_warps = current_warp = 0;
  std::fill(std::begin(barriers), std::end(barriers), Barrier{});
  mbarriers.clear();
  shared.reset();
  current = {this, nullptr};
  os_thread.adopt_os_thread();
  for (uint32_t i = 0; i < num_warps; ++i) warps[i].ready = warps[i].exited = 0;
  for (uint32_t i = 0; i < num_threads; ++i) {
    Thread& thread = threads[i];
    thread.done = false;
    thread.fiber.start(stacks + i * options().stack_bytes, options().stack_bytes, thread_main);
    make_ready(thread);
  }
  publish(this);
  Thread& first = take_next_ready(*this);
  current.thread = &first;
  Fiber::switch_to(os_thread, first.fiber);
  observe(this);
  current = {nullptr, nullptr};
  if (error) std::rethrow_exception(error);
  for (const MBarrier& barrier : mbarriers) {
    if (!barrier.copies.empty()) {
      throw KernelError("the block ended with bulk copies in flight [block " + coordinates(index) +
                        "]");
    }
  }
}

void fail(const std::string& what, const Thread& thread) {
  throw KernelError(what + " [block " + coordinates(current.block->index) + " thread " +
                    coordinates(thread.index) + "]");
}

void fail(const std::string& what) { fail(what, *current.thread); }

void make_ready(Thread& thread) {
  thread.waits_at = nullptr;
  current.block->warps[thread.warp].ready |= 1u << thread.lane;
  current.block->ready_warps |= 1u << thread.warp;
}

void wait_at(const char* what) {
  current.thread->waits_at = what;
  run_others();
}

void scheduling_point() {
  constexpr uint32_t kPollsInARow = 64;
  if (options().seed != 0 || ++current.block->polls % kPollsInARow == 0) yield();
}

void meet(const Collective& collective, uint32_t mask, void* operands) {
  Block& block = *current.block;
  Thread& thread = *current.thread;
  Warp& warp = block.warps[thread.warp];
  const uint32_t lane = 1u << thread.lane;
  ++block.num_collectives;
  if ((mask & lane) == 0) {
    fail(std::string(collective.name) + " is called by a lane that its mask does not name");
  }
  Warp::Meeting& meeting = find_meeting(warp, collective, mask);
  char* order = meeting.order;
  if (collective.orders_memory) publish(order);
  thread.operands = operands;
  meeting.arrived |= lane;
  if (all_arrived(warp, meeting)) {
    complete(warp, meeting);
    if (options().seed != 0) yield();
  } else {
    wait_at(collective.name);
  }
  if (collective.orders_memory) observe(order);
}

}  // namespace cuda_on_host
