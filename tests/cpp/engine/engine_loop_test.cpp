// run(): the engine core's own loop, with a worker behind a pair of shared-memory rings.
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "engine_fixture.h"

namespace vllm_lite::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// One end of each ring in this process, as the two processes have them.
struct RingPair {
  explicit RingPair(size_t max_message_bytes)
      : fd(ShmRing::create(2, max_message_bytes)), engine(fd), worker(fd) {}
  ~RingPair() { ::close(fd); }
  int fd;
  ShmRing engine, worker;
};

// What the worker's thread does with a plan, which it releases; false: it goes away without another
// word.
using Answer = std::function<bool(std::span<const int32_t> plan, std::vector<int32_t>& result)>;

// With asynchronous scheduling or without.
class EngineLoop : public EngineTest, public ::testing::WithParamInterface<bool> {
 protected:
  EngineLoop() { config_.async_scheduling = GetParam(); }

  // Starts run() and a worker.
  void start(std::chrono::milliseconds step_timeout = 20s, Answer answer = {},
             size_t max_plan_bytes = 1 << 16) {
    engine();
    plans_ = std::make_unique<RingPair>(max_plan_bytes);
    results_ = std::make_unique<RingPair>(1 << 16);
    if (!answer) {
      answer = [this](std::span<const int32_t> plan, std::vector<int32_t>& result) {
        result = engine_->worker.execute(plan);
        plans_->worker.release();
        return true;
      };
    }
    worker_ = std::thread([this, answer] {
      std::span<const std::byte> message;
      while (plans_->worker.peek(message, 60s) == ShmRing::Wait::kReady) {
        const std::span plan(reinterpret_cast<const int32_t*>(message.data()),
                             message.size() / sizeof(int32_t));
        std::vector<int32_t> result;
        if (!answer(plan, result)) return;
        results_->worker.push(std::as_bytes(std::span(result)), 60s);
      }
    });
    loop_ = std::thread([this, step_timeout] {
      try {
        core().run(plans_->engine, results_->engine, step_timeout);
      } catch (const std::exception& error) {
        failure_ = error.what();
      }
      loop_ended_ = true;
    });
  }

  // What run() threw; "" if it came back.
  std::string join() {
    loop_.join();
    plans_->engine.close();
    worker_.join();
    return failure_;
  }
  std::string stop() {
    core().stop();
    return join();
  }

  // Takes outputs until all samples of these requests have ended.
  void wait_for(const std::vector<RequestInput>& inputs) {
    const auto done = [&] {
      for (const RequestInput& input : inputs) {
        if (!engine_->clients[client_of(input.key)].finished(input.key, input.num_samples)) {
          return false;
        }
      }
      return true;
    };
    while (!done()) {
      const auto messages = core().wait_outputs();
      ASSERT_FALSE(messages.empty()) << "stopped";
      for (const auto& [client, message] : messages) engine_->clients[client].take(message);
    }
  }
  void expect_errors(const std::vector<RequestInput>& inputs, const std::string& message) {
    engine_->take_outputs();
    for (const RequestInput& input : inputs) {
      for (int32_t i = 0; i < input.num_samples; ++i) {
        const Sample& sample = engine_->sample(input.key, i);
        EXPECT_EQ(sample.finish_reason, "error");
        EXPECT_NE(sample.message.find(message), std::string::npos) << sample.message;
      }
    }
    engine_->expect_idle();
    EXPECT_FALSE(core().has_work());
  }

  std::unique_ptr<RingPair> plans_, results_;
  std::thread worker_, loop_;
  std::string failure_;
  std::atomic<bool> loop_ended_ = false;
};

TEST_P(EngineLoop, AnswersEveryRequestAndStopsWhenIdle) {
  config_.num_clients = 2;
  start();
  std::vector<RequestInput> inputs;
  for (TokenId i = 0; i < 30; ++i) {
    RequestInput& input = inputs.emplace_back(request(prompt(4 + i, i % 4), 20));
    input.key = make_key(static_cast<uint16_t>(i % 2), static_cast<uint64_t>(i));
    input.num_samples = 1 + i % 3;
    input.stops = {"ab"};
    core().submit(input);
  }
  wait_for(inputs);
  for (const RequestInput& input : inputs) engine_->expect_solo(input);
  EXPECT_EQ(stop(), "");
  EXPECT_TRUE(core().wait_outputs().empty());
  engine_->expect_idle();
}

TEST_P(EngineLoop, StopsAfterTheStepInFlight) {
  std::atomic<int> num_steps = 0;
  start(20s, [&](std::span<const int32_t> plan, std::vector<int32_t>& result) {
    ++num_steps;
    std::this_thread::sleep_for(5ms);
    result = engine_->worker.execute(plan);
    plans_->worker.release();
    return true;
  });
  core().submit(endless(5, 120));
  while (num_steps < 3) std::this_thread::sleep_for(1ms);
  core().stop();
  const int before = num_steps;
  EXPECT_EQ(join(), "");
  EXPECT_LE(num_steps, before + core().max_outstanding());
  EXPECT_FALSE(core().wait_outputs().empty());  // what it gave
  EXPECT_TRUE(core().wait_outputs().empty());
}

// A worker that answers a plan only once it has the next: it need not wait for the engine core.
TEST_P(EngineLoop, NextPlanIsThereBeforeTheResultIfAsynchronous) {
  constexpr int kNumSteps = 8;
  int num_overlapped = 0;
  start(20s, [&](std::span<const int32_t> words, std::vector<int32_t>& result) {
    result = engine_->worker.execute(words);
    const bool is_last = PlanView(words).step() == kNumSteps;
    plans_->worker.release();
    std::span<const std::byte> next;
    const auto timeout = is_last ? 0ms : GetParam() ? 20000ms : 10ms;
    num_overlapped += plans_->worker.peek(next, timeout) == ShmRing::Wait::kReady;
    return true;
  });
  const RequestInput input = endless(5, kNumSteps);
  core().submit(input);
  wait_for({input});
  engine_->expect_solo(input);
  EXPECT_EQ(stop(), "");
  EXPECT_EQ(num_overlapped, GetParam() ? kNumSteps - 1 : 0);
}

TEST_P(EngineLoop, StopWakesWhoeverWaits) {
  start();
  std::thread outbox([&] { EXPECT_TRUE(core().wait_outputs().empty()); });
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(stop(), "");
  outbox.join();
}

TEST_P(EngineLoop, StoppedBeforeItRan) {
  core().stop();
  start();
  EXPECT_EQ(join(), "");
}

TEST_P(EngineLoop, WorkerThatClosesItsRingEndsEverythingWithAnError) {
  config_.scheduler.max_num_seqs = 2;
  // Made before the threads: a sanitizer does not see that a message in the ring orders them.
  std::vector<RequestInput> inputs;
  for (TokenId i = 0; i < 4; ++i) inputs.push_back(endless(5, 50, i));
  inputs[2].num_samples = 2;  // waits
  std::atomic<int> num_steps = 0;
  start(20s, [&](std::span<const int32_t> plan, std::vector<int32_t>& result) {
    if (++num_steps == 3) {
      // One more that the engine has not seen when it learns of it.
      core().submit(inputs[3]);
      results_->worker.close();
      return false;
    }
    result = engine_->worker.execute(plan);
    plans_->worker.release();
    return true;
  });
  for (int i = 0; i < 3; ++i) core().submit(inputs[static_cast<size_t>(i)]);
  EXPECT_EQ(join(), "the worker closed its ring");
  expect_errors(inputs, "the worker closed its ring");
}

TEST_P(EngineLoop, WorkerThatClosedTheRingOfPlans) {
  start();
  plans_->worker.close();
  const RequestInput input = endless(5, 50);
  core().submit(input);
  EXPECT_EQ(join(), "the worker closed its ring");
  expect_errors({input}, "the worker closed its ring");
}

TEST_P(EngineLoop, WorkerThatIsTooSlow) {
  std::atomic<bool> hangs = true;
  start(50ms, [&](std::span<const int32_t>, std::vector<int32_t>&) {
    while (hangs) std::this_thread::sleep_for(1ms);
    return false;
  });
  const RequestInput input = endless(5, 50);
  core().submit(input);
  while (!loop_ended_) std::this_thread::sleep_for(1ms);
  hangs = false;
  EXPECT_EQ(join(), "the worker gave no result within 50 ms (step_timeout)");
  expect_errors({input}, "50 ms");
}

TEST_P(EngineLoop, WorkerThatAnswersNonsense) {
  start(20s, [&](std::span<const int32_t>, std::vector<int32_t>& result) {
    result.assign(3, 7);
    plans_->worker.release();
    return true;
  });
  const RequestInput input = endless(5, 50);
  core().submit(input);
  EXPECT_NE(join(), "");
  expect_errors({input}, "no result of this step");
}

TEST_P(EngineLoop, FailedStepsEndTheirRequestsAlone) {
  engine().worker.fails = [](const PlanView& plan) { return plan.step() == 2 ? "no" : ""; };
  start();
  const RequestInput first = endless(5, 20, 1), second = endless(5, 20, 2);
  core().submit(first);
  wait_for({first});
  core().submit(second);
  wait_for({second});
  EXPECT_EQ(engine_->sample(first.key).message, "no");
  engine_->expect_solo(second);
  EXPECT_EQ(stop(), "");
}

TEST_P(EngineLoop, PlanLongerThanTheRingFailsItsStepAlone) {
  start(20s, {}, 600);
  const RequestInput small = endless(4, 5, 1), large = endless(60, 5, 2);
  core().submit(small);
  wait_for({small});
  core().submit(large);
  wait_for({large});
  EXPECT_EQ(engine_->sample(large.key).finish_reason, "error");
  EXPECT_NE(engine_->sample(large.key).message.find("at most 600"), std::string::npos);
  const RequestInput after = endless(4, 5, 3);
  core().submit(after);
  wait_for({after});
  engine_->expect_solo(small);
  engine_->expect_solo(after);
  EXPECT_EQ(stop(), "");
}

double cpu_seconds(std::thread& thread) {
  clockid_t clock;
  timespec time;
  EXPECT_EQ(pthread_getcpuclockid(thread.native_handle(), &clock), 0);
  EXPECT_EQ(clock_gettime(clock, &time), 0);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

TEST_P(EngineLoop, IdleTakesNoProcessorTime) {
  start();
  const RequestInput input = endless(5, 10);
  core().submit(input);
  wait_for({input});
  std::this_thread::sleep_for(10ms);  // the last step's end
  const double before = cpu_seconds(loop_);
  std::this_thread::sleep_for(300ms);
  EXPECT_LT(cpu_seconds(loop_) - before, 0.01);
  EXPECT_EQ(stop(), "");
}

// For the thread sanitizer: every thread-safe call, from many threads, while it runs.
TEST_P(EngineLoop, ManyThreads) {
  constexpr int kNumThreads = 3;
  constexpr int kNumRequests = 60;
  config_.num_clients = kNumThreads;
  config_.cache.num_blocks = 32;
  start();
  std::vector<std::vector<RequestInput>> inputs(kNumThreads);
  for (int t = 0; t < kNumThreads; ++t) {
    for (int i = 0; i < kNumRequests; ++i) {
      auto& input = inputs[static_cast<size_t>(t)].emplace_back(
          request(prompt(1 + i % 20, i % 5), 1 + i % 15));
      input.key = make_key(static_cast<uint16_t>(t), static_cast<uint64_t>(i));
      input.num_samples = 1 + i % 2;
    }
  }
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kNumThreads; ++t) {
    threads.emplace_back([&, t] {
      Client& client = engine_->clients[t];
      for (size_t i = 0; i < kNumRequests; ++i) {
        core().submit(inputs[t][i]);
        if (i % 4 == 1) core().abort(inputs[t][i / 2].key);
        EXPECT_GE(core().stats().num_steps, 0);
      }
      const auto deadline = Clock::now() + 60s;
      for (size_t i = 0; i < kNumRequests; ++i) {
        const bool may_be_aborted = i < kNumRequests / 2;
        while (!may_be_aborted && !client.finished(inputs[t][i].key, inputs[t][i].num_samples)) {
          ASSERT_LT(Clock::now(), deadline);
          if (const auto message = core().take_outputs(static_cast<uint16_t>(t))) {
            client.take(*message);
          } else {
            std::this_thread::yield();
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // What was not aborted may still be running.
  const auto deadline = Clock::now() + 60s;
  while (core().stats().num_running + core().stats().num_waiting > 0) {
    ASSERT_LT(Clock::now(), deadline);
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(stop(), "");
  engine_->expect_idle();
  for (const auto& of_thread : inputs) {
    for (size_t i = 0; i < of_thread.size(); ++i) {
      const RequestInput& input = of_thread[i];
      if (i >= kNumRequests / 2 ||
          engine_->clients[client_of(input.key)].finished(input.key, input.num_samples)) {
        engine_->expect_solo(input);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Depth, EngineLoop, ::testing::Bool(), [](const auto& is_async) {
  return is_async.param ? "Asynchronous" : "Synchronous";
});

}  // namespace
}  // namespace vllm_lite::testing
