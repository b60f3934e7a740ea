#include "core/parallel_for.h"

#include <atomic>

namespace vllm_lite {
namespace {

void run_serially(int64_t count, int64_t /*grain*/, const void* context, ParallelBody body) {
  body(context, 0, count);
}

std::atomic<ParallelBackend> current_backend{run_serially};

}  // namespace

void set_parallel_backend(ParallelBackend backend) {
  current_backend.store(backend ? backend : run_serially);
}

void parallel_for_impl(int64_t count, int64_t grain, const void* context, ParallelBody body) {
  if (count <= 0) return;
  if (count <= grain) {
    body(context, 0, count);
    return;
  }
  current_backend.load(std::memory_order_relaxed)(count, grain, context, body);
}

}  // namespace vllm_lite
