#include "cuda_on_host/async_copy.h"

#include <cstring>
#include <string>

#include "cuda_on_host/block.h"
#include "cuda_on_host/options.h"
#include "cuda_on_host/shared_memory.h"
#include "sanitizers.h"

namespace cuda_on_host {
namespace {

void check_aligned(const char* what, const void* p, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(p) % alignment != 0) {
    fail(std::string(what) + ": an address is not " + std::to_string(alignment) + "-byte aligned");
  }
}

void fill_with_nan(void* to, size_t bytes) {
  announce_write(to, bytes);
  std::memset(to, 0xff, bytes);
}

void copy_now(void* to, const void* from, size_t bytes) {
  announce_write(to, bytes);
  if (from == nullptr) {
    std::memset(to, 0, bytes);
  } else {
    announce_read(from, bytes);
    std::memcpy(to, from, bytes);
  }
}

// The async proxy (wgmma) sees this copy of the running thread after its next fence.
void mark_copy(const void* to) {
  SharedMemory& shared = current.block->shared;
  if (shared.copy_marks.empty()) return;
  const Thread& thread = *current.thread;
  shared.copy_marks[shared_address(to) / kCopyBytes] = {
      static_cast<uint32_t>(&thread - current.block->threads.get()) + 1, thread.proxy_fences};
}

// A bulk copy is the async proxy's own.
void clear_marks(const void* to, size_t bytes) {
  SharedMemory& shared = current.block->shared;
  const size_t first = shared_address(to) / kCopyBytes;
  for (size_t i = 0; i < bytes / kCopyBytes; ++i) shared.copy_marks[first + i] = {0, 0};
}

}  // namespace

void fence_async_proxy() {
  check_sm90("fence.proxy.async");
  ++current.thread->proxy_fences;
}

void copy_16_async(void* to_shared, const void* from, bool valid) {
  const KernelFrame frame(__builtin_return_address(0));
  shared_address(to_shared);
  check_aligned("cp.async", to_shared, kCopyBytes);
  check_aligned("cp.async", from, kCopyBytes);
  if (valid) announce_read(from, kCopyBytes);
  fill_with_nan(to_shared, kCopyBytes);
  current.thread->copies.copies.push_back({to_shared, valid ? from : nullptr});
}

void commit_copies() {
  CopyQueue& queue = current.thread->copies;
  queue.group_ends.push_back(queue.copies.size());
}

void wait_copies(uint32_t pending) {
  const KernelFrame frame(__builtin_return_address(0));
  CopyQueue& queue = current.thread->copies;
  if (queue.group_ends.size() <= pending) return;
  const size_t groups = queue.group_ends.size() - pending;
  const size_t copies = queue.group_ends[groups - 1];
  for (size_t i = 0; i < copies; ++i) {
    copy_now(queue.copies[i].to, queue.copies[i].from, kCopyBytes);
    mark_copy(queue.copies[i].to);
  }
  queue.copies.erase(queue.copies.begin(), queue.copies.begin() + static_cast<long>(copies));
  queue.group_ends.erase(queue.group_ends.begin(),
                         queue.group_ends.begin() + static_cast<long>(groups));
  for (size_t& end : queue.group_ends) end -= copies;
}

// ---- mbarrier: the object in shared memory holds its number in Block::mbarriers.

namespace {

constexpr uint64_t kObjectTag = 0xba221e2000000000u;

MBarrier& mbarrier_at(uint64_t* object, const char* what) {
  check_sm90(what);
  shared_address(object);
  check_aligned(what, object, 8);
  announce_read(object, sizeof(*object));
  MBarrier* mbarriers = current.block->mbarriers;
  const uint64_t number = *object ^ kObjectTag;
  if (number >= current.block->num_mbarriers || mbarriers[number].object != object) {
    fail(std::string(what) + ": the mbarrier is not initialised, or was overwritten");
  }
  return mbarriers[number];
}

// The async unit's copies become visible to those who wait for the phase.
void end_phase_if_complete(MBarrier& barrier) {
  if (barrier.missing != 0 || barrier.expected_bytes != barrier.pending_bytes) return;
  char* order = &barrier.order[barrier.phase & 1];
  observe(order);
  for (uint32_t i = 0; i < barrier.num_copies; ++i) {
    const MBarrier::BulkCopy& copy = barrier.copies[i];
    copy_now(copy.to, copy.from, copy.bytes);
    clear_marks(copy.to, copy.bytes);
  }
  publish(order);
  barrier.num_copies = 0;
  barrier.expected_bytes = barrier.pending_bytes = 0;
  barrier.missing = barrier.arrivals;
  ++barrier.phase;
  make_all_ready(barrier.waiting);
}

void arrive(uint64_t* object, uint32_t bytes, const char* what) {
  MBarrier& barrier = mbarrier_at(object, what);
  publish(&barrier.order[barrier.phase & 1]);
  if (barrier.missing == 0) fail(std::string(what) + ": more arrivals than the phase expects");
  barrier.expected_bytes += bytes;
  --barrier.missing;
  end_phase_if_complete(barrier);
  scheduling_point();
}

}  // namespace

void mbarrier_init(uint64_t* object, uint32_t arrivals) {
  const KernelFrame frame(__builtin_return_address(0));
  check_sm90("mbarrier.init");
  shared_address(object);
  check_aligned("mbarrier.init", object, 8);
  if (arrivals == 0) fail("mbarrier.init: needs one arrival at least");
  Block& block = *current.block;
  for (MBarrier& barrier : block.mbarriers) {
    if (barrier.object == object) barrier.object = nullptr;
  }
  announce_write(object, sizeof(*object));
  if (block.num_mbarriers == kMaxMBarriers) fail("mbarrier.init: the block has too many mbarriers");
  *object = block.num_mbarriers ^ kObjectTag;
  MBarrier& barrier = block.mbarriers[block.num_mbarriers++];
  barrier.object = object;
  barrier.arrivals = barrier.missing = arrivals;
}

void mbarrier_arrive(uint64_t* object) {
  const KernelFrame frame(__builtin_return_address(0));
  arrive(object, 0, "mbarrier.arrive");
}

void mbarrier_arrive_expect(uint64_t* object, uint32_t bytes) {
  const KernelFrame frame(__builtin_return_address(0));
  arrive(object, bytes, "mbarrier.arrive.expect_tx");
}

void mbarrier_wait(uint64_t* object, uint32_t parity) {
  const KernelFrame frame(__builtin_return_address(0));
  MBarrier& barrier = mbarrier_at(object, "mbarrier.try_wait");
  const uint32_t phase = barrier.phase & 1;
  if (phase == parity) {
    barrier.waiting[current.thread->warp] |= 1u << current.thread->lane;
    wait_at("mbarrier.try_wait");
  } else {
    scheduling_point();
  }
  observe(&barrier.order[parity]);
}

void copy_bulk_async(void* to_shared, const void* from, uint32_t bytes, uint64_t* object) {
  const KernelFrame frame(__builtin_return_address(0));
  MBarrier& barrier = mbarrier_at(object, "cp.async.bulk");
  shared_address(to_shared);
  check_aligned("cp.async.bulk", to_shared, kCopyBytes);
  check_aligned("cp.async.bulk", from, kCopyBytes);
  if (bytes % kCopyBytes != 0) {
    fail("cp.async.bulk of " + std::to_string(bytes) + " bytes: must be a multiple of 16");
  }
  announce_read(from, bytes);
  fill_with_nan(to_shared, bytes);
  publish(&barrier.order[barrier.phase & 1]);
  barrier.pending_bytes += bytes;
  if (barrier.num_copies == kMaxBulkCopies) fail("cp.async.bulk: too many copies in one phase");
  barrier.copies[barrier.num_copies++] = {to_shared, from, bytes};
  end_phase_if_complete(barrier);
}

}  // namespace cuda_on_host
