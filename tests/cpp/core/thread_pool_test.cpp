#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace vllm_lite {
namespace {

template <typename F>
void run(ThreadPool& pool, int64_t count, int64_t grain, const F& body) {
  pool.run(count, grain, &body, [](const void* context, int64_t begin, int64_t end) {
    (*static_cast<const F*>(context))(begin, end);
  });
}

TEST(ThreadPool, EveryItemOnceInRangesOfWholeGrains) {
  std::mt19937 random(1);
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 3000; ++round) {
      const auto count = static_cast<int64_t>(random() % 300);
      const auto grain = static_cast<int64_t>(random() % 20);
      std::vector<std::atomic<int>> times(static_cast<size_t>(count));
      run(pool, count, grain, [&](int64_t begin, int64_t end) {
        EXPECT_LE(begin, end);
        EXPECT_EQ(begin % std::max<int64_t>(grain, 1), 0);
        EXPECT_TRUE(end == count || end - begin >= grain);
        for (int64_t i = begin; i < end; ++i) ++times[static_cast<size_t>(i)];
      });
      for (const auto& n : times) ASSERT_EQ(n, 1) << threads << " threads, round " << round;
    }
  }
}

// Plain memory that one job writes and the next reads on other threads.
TEST(ThreadPool, AJobSeesWhatTheOneBeforeWrote) {
  ThreadPool pool(4);
  constexpr int64_t kSize = 257;
  std::vector<int64_t> a(kSize, 0), b(kSize, 0);
  for (int64_t round = 1; round <= 5000; ++round) {
    run(pool, kSize, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        a[static_cast<size_t>(i)] = b[static_cast<size_t>(kSize - 1 - i)] + 1;
      }
    });
    a.swap(b);
  }
  for (int64_t x : b) EXPECT_EQ(x, 5000);
}

TEST(ThreadPool, AllThreadsWork) {
  ThreadPool pool(3);
  // No range ends before three are under way.
  std::atomic<int> working{0};
  run(pool, 3, 1, [&](int64_t begin, int64_t end) {
    EXPECT_EQ(end - begin, 1);
    ++working;
    while (working < 3) std::this_thread::yield();
  });
  EXPECT_EQ(working, 3);
}

TEST(ThreadPool, SleepersWakeUp) {
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> working{0};
    run(pool, 2, 1, [&](int64_t, int64_t) {
      ++working;
      while (working < 2) std::this_thread::yield();
    });
  }
}

TEST(ThreadPool, AJobInsideAJobRunsAlone) {
  ThreadPool pool(2);
  std::atomic<int64_t> sum{0};
  run(pool, 8, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      run(pool, 10, 1, [&](int64_t first, int64_t last) {
        EXPECT_EQ(first, 0);
        EXPECT_EQ(last, 10);
        sum += last;
      });
    }
  });
  EXPECT_EQ(sum, 80);
}

TEST(ThreadPool, TwoCallersAtOnce) {
  ThreadPool pool(3);
  const auto call = [&] {
    for (int round = 0; round < 2000; ++round) {
      std::atomic<int64_t> sum{0};
      run(pool, 100, 3, [&](int64_t begin, int64_t end) { sum += end - begin; });
      ASSERT_EQ(sum, 100);
    }
  };
  std::thread other(call);
  call();
  other.join();
}

TEST(ThreadPool, ThrowsWhatABodyThrewAndGoesOn) {
  ThreadPool pool(2);
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> done{0};
    EXPECT_THROW(run(pool, 50, 1,
                     [&](int64_t begin, int64_t) {
                       ++done;
                       if (begin == 0) throw std::runtime_error("first");
                     }),
                 std::runtime_error);
    EXPECT_GT(done, 0);
    std::atomic<int64_t> sum{0};
    run(pool, 50, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
    EXPECT_EQ(sum, 50);
  }
}

int cpu_of_only() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0 || CPU_COUNT(&set) != 1) return -1;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) return cpu;
  }
  return -1;
}

TEST(ThreadPool, PinnedThreadsStayOnTheirCpus) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 2; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  if (cpus.size() < 2) GTEST_SKIP() << "one CPU";
  std::swap(cpus[0], cpus[1]);
  // Not the test's own thread: it would stay pinned.
  std::thread caller([&] {
    ThreadPool pool(2);
    EXPECT_ANY_THROW(pool.pin({cpus[0]}));
    EXPECT_FALSE(pool.pin({-1, cpus[1]}));
    ASSERT_TRUE(pool.pin(cpus));
    std::atomic<int> working{0};
    std::atomic<int> found[2] = {-1, -1};
    run(pool, 2, 1, [&](int64_t begin, int64_t) {
      found[begin] = cpu_of_only();
      // Neither ends before the other has begun.
      for (++working; working < 2;) std::this_thread::yield();
    });
    EXPECT_EQ(std::min(found[0].load(), found[1].load()), std::min(cpus[0], cpus[1]));
    EXPECT_EQ(std::max(found[0].load(), found[1].load()), std::max(cpus[0], cpus[1]));
    EXPECT_EQ(cpu_of_only(), cpus[0]);
  });
  caller.join();
}

TEST(ThreadPool, NeedsAThread) { EXPECT_ANY_THROW(ThreadPool(0)); }

}  // namespace
}  // namespace vllm_lite
