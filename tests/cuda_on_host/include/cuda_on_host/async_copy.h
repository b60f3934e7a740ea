// Copies from global to shared memory that run beside the thread. They are carried out as late as
// the program allows, and what they will overwrite is NaN until then: a wait that is missing, or
// waits for too few, shows in the result.
#pragma once

#include <cstdint>

namespace cuda_on_host {

// cp.async of 16 bytes; zeros if not `valid`.
void copy_16_async(void* to_shared, const void* from, bool valid);
void commit_copies();
// Until at most `pending` of the thread's latest groups are unfinished.
void wait_copies(uint32_t pending);

// fence.proxy.async: wgmma may read what the thread's cp.async wrote so far.
void fence_async_proxy();

// sm_90: mbarrier objects and cp.async.bulk.
void mbarrier_init(uint64_t* barrier, uint32_t arrivals);
void mbarrier_arrive(uint64_t* barrier);
void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes);
// Until the phase of that parity has ended.
void mbarrier_wait(uint64_t* barrier, uint32_t parity);
void copy_bulk_async(void* to_shared, const void* from, uint32_t bytes, uint64_t* barrier);

}  // namespace cuda_on_host
