#include "cuda_on_host/block.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "cuda_on_host/options.h"
#include "sanitizers.h"

namespace cuda_on_host {

constinit thread_local Current current{nullptr, nullptr};

namespace {

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t x = state += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// The number of a set bit of `mask`: a random one under a seed, else the first from `first` on,
// around.
uint32_t pick(Block& block, uint32_t mask, uint32_t first) {
  if (block.random) {
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
  const bool stay = !block.random && (block.ready_warps >> block.current_warp & 1) != 0;
  if (!stay) block.current_warp = pick(block, block.ready_warps, block.current_warp + 1);
  Warp& warp = block.warps[block.current_warp];
  const bool same_warp = thread != nullptr && thread->warp == block.current_warp;
  Thread& next = *warp.threads[pick(block, warp.ready, same_warp ? thread->lane + 1 : 0)];
  clear_ready(block, next);
  return next;
}

[[noreturn]] void fail_for_deadlock(Block& block) {
  constexpr int kNamed = 6;
  std::string what;
  const Thread* first = nullptr;
  int waiting = 0;
  for (uint32_t i = 0; i < block.num_threads; ++i) {
    const Thread& thread = block.threads[i];
    if (thread.done) continue;
    if (first == nullptr) first = &thread;
    if (waiting++ < kNamed) what += ", " + coordinates(thread.index) + " at " + thread.waits_at;
  }
  what = "deadlock: " + std::to_string(waiting) + " of " + std::to_string(block.num_threads) +
         " threads wait" + what + (waiting > kNamed ? ", ..." : "");
  for (const MBarrier& barrier : block.mbarriers) {
    const auto is_set = [](uint32_t lanes) { return lanes != 0; };
    if (!std::any_of(std::begin(barrier.waiting), std::end(barrier.waiting), is_set)) continue;
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
  make_ready(warp, met.arrived & ~(1u << current.thread->lane));
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
  if (!thread.wgmma.products.empty()) fail("the thread returned with wgmma products in flight");
  if (block.warp_groups[thread.warp / kWarpsPerGroup].arrived != 0) {
    fail("the thread returned while others of its warpgroup wait for it at wgmma");
  }
  thread.wgmma = {};
  thread.done = true;
  --block.live;
  if (block.barriers[0].arrived != 0) {
    fail("the thread returned while others wait for it at __syncthreads()");
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
  for (uint32_t i = 0; i < num_threads; ++i) {
    Thread& thread = threads[i];
    thread.index = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
    thread.lane = i % kWarpSize;
    thread.warp = i / kWarpSize;
    warps[thread.warp].number = thread.warp;
    warps[thread.warp].threads[thread.lane] = &thread;
    warps[thread.warp].members |= 1u << thread.lane;
  }
}

void Block::run(uint3 block_index, uint64_t seed) {
  index = block_index;
  random = options().seed != 0;
  random_state = seed;
  live = num_threads;
  num_started += num_threads;
  ready_warps = current_warp = 0;
  std::fill(std::begin(barriers), std::end(barriers), Barrier{});
  std::fill(std::begin(warp_groups), std::end(warp_groups), WarpGroup{});
  std::fill(mbarriers, mbarriers + num_mbarriers, MBarrier{});
  num_mbarriers = 0;
  shared.reset();
  current = {this, nullptr};
  os_thread.adopt_os_thread();
  for (uint32_t i = 0; i < num_warps; ++i) warps[i].ready = warps[i].exited = 0;
  for (uint32_t i = 0; i < num_threads; ++i) {
    Thread& thread = threads[i];
    thread.done = false;
    thread.fiber.start(thread_main);
    make_ready(thread);
  }
  publish(this);
  Thread& first = take_next_ready(*this);
  current.thread = &first;
  Fiber::switch_to(os_thread, first.fiber);
  current = {nullptr, nullptr};
  if (error) {
    // What comes after the launch comes after what all threads did, however far they got.
    for (uint32_t i = 0; i < num_threads; ++i) threads[i].fiber.publish_abandoned(this);
  }
  observe(this);
  if (error) std::rethrow_exception(std::exchange(error, nullptr));
  for (const MBarrier& barrier : mbarriers) {
    if (barrier.num_copies != 0) {
      throw KernelError("the block ended with bulk copies in flight [block " + coordinates(index) +
                        "]");
    }
  }
}

std::string coordinates(uint3 index) {
  return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," +
         std::to_string(index.z) + ")";
}

void check_sm90(const char* what) {
  if (options().compute_capability < 90) {
    fail(std::string(what) + " needs compute capability 9.0; options().compute_capability is " +
         std::to_string(options().compute_capability));
  }
}

void fail(const std::string& what, const Thread& thread) {
  throw KernelError(what + " [block " + coordinates(current.block->index) + " thread " +
                    coordinates(thread.index) + "]");
}

void fail(const std::string& what) { fail(what, *current.thread); }

void make_ready(Warp& warp, uint32_t lanes) {
  warp.ready |= lanes;
  current.block->ready_warps |= 1u << warp.number;
}

void make_ready(const Thread& thread) {
  make_ready(current.block->warps[thread.warp], 1u << thread.lane);
}

void make_all_ready(uint32_t (&waiting)[kMaxThreads / kWarpSize]) {
  Block& block = *current.block;
  for (uint32_t i = 0; i < block.num_warps; ++i) {
    if (waiting[i] != 0) make_ready(block.warps[i], std::exchange(waiting[i], 0));
  }
}

void wait_at(const char* what) {
  Thread& thread = *current.thread;
  thread.waits_at = what;
  run_others();
  thread.waits_at = nullptr;
}

void scheduling_point() {
  constexpr uint32_t kPollsInARow = 64;
  if (current.block->random || ++current.block->polls % kPollsInARow == 0) yield();
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
  if (collective.order == Collective::Order::kAll) publish(order);
  thread.operands = operands;
  meeting.arrived |= lane;
  if (all_arrived(warp, meeting)) {
    complete(warp, meeting);
    if (collective.order == Collective::Order::kAfterLast) publish(order);
    if (block.random) yield();
  } else {
    wait_at(collective.name);
  }
  if (collective.order != Collective::Order::kNone) observe(order);
}

}  // namespace cuda_on_host
