#include "core/parallel_for.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace vllm_lite {
namespace {

std::atomic<int> backend_calls{0};

// Pieces of `grain` items, each on a thread of its own.
void run_on_threads(int64_t count, int64_t grain, const void* context, ParallelBody body) {
  ++backend_calls;
  std::vector<std::thread> threads;
  for (int64_t begin = 0; begin < count; begin += grain) {
    threads.emplace_back(body, context, begin, std::min(begin + grain, count));
  }
  for (std::thread& thread : threads) thread.join();
}

class ParallelForTest : public testing::Test {
 protected:
  ParallelForTest() { backend_calls = 0; }
  ~ParallelForTest() override { set_parallel_backend(nullptr); }
};

std::vector<int> visits(int64_t count, int64_t grain) {
  std::vector<int> visits(static_cast<size_t>(std::max<int64_t>(count, 0)), 0);
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
  });
  return visits;
}

TEST_F(ParallelForTest, VisitsEveryItemOnceWithoutABackend) {
  EXPECT_EQ(visits(10, 3), std::vector<int>(10, 1));
}

TEST_F(ParallelForTest, VisitsEveryItemOnceOnABackend) {
  set_parallel_backend(run_on_threads);
  EXPECT_EQ(visits(10, 3), std::vector<int>(10, 1));
  EXPECT_EQ(backend_calls, 1);
}

TEST_F(ParallelForTest, WorkOfOneGrainStaysOnTheCallingThread) {
  set_parallel_backend(run_on_threads);
  std::thread::id id;
  parallel_for(8, 8, [&](int64_t, int64_t) { id = std::this_thread::get_id(); });
  EXPECT_EQ(id, std::this_thread::get_id());
  EXPECT_EQ(backend_calls, 0);
}

TEST_F(ParallelForTest, NothingToDoCallsNothing) {
  bool called = false;
  parallel_for(0, 1, [&](int64_t, int64_t) { called = true; });
  parallel_for(-5, 1, [&](int64_t, int64_t) { called = true; });
  EXPECT_FALSE(called);
}

TEST_F(ParallelForTest, NoBackendMeansTheSerialOneAgain) {
  set_parallel_backend(run_on_threads);
  set_parallel_backend(nullptr);
  int ranges = 0;
  parallel_for(100, 1, [&](int64_t begin, int64_t end) {
    ++ranges;
    EXPECT_EQ(begin, 0);
    EXPECT_EQ(end, 100);
  });
  EXPECT_EQ(ranges, 1);
  EXPECT_EQ(backend_calls, 0);
}

}  // namespace
}  // namespace vllm_lite
