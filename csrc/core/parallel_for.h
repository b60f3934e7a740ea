// One way for every CPU kernel to use several cores.
//
// The work is cut by item index only, never by thread count into partial sums, so that a result
// does not depend on how many threads there are. Serial until a backend is installed
// (thread_pool.h).
#pragma once

#include <cstdint>

namespace vllm_lite {

using ParallelBody = void (*)(const void* context, int64_t begin, int64_t end);
// Calls body(context, begin, end) over disjoint ranges that cover [0, count), each at least `grain`
// long but for the last; returns when all are done.
using ParallelBackend = void (*)(int64_t count, int64_t grain, const void* context,
                                 ParallelBody body);

void set_parallel_backend(ParallelBackend backend);
void parallel_for_impl(int64_t count, int64_t grain, const void* context, ParallelBody body);

// `static`: kernels are compiled once per instruction set, and an inline function shared between
// those objects could be linked from the wrong one.
template <typename F>
static inline void parallel_for(int64_t count, int64_t grain, const F& body) {
  parallel_for_impl(count, grain, &body, [](const void* context, int64_t begin, int64_t end) {
    (*static_cast<const F*>(context))(begin, end);
  });
}

}  // namespace vllm_lite
