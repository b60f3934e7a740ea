// Steady-state decode allocates no heap memory: counted by replacing operator new in this program.

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <tuple>
#include <vector>

#include "scheduler/scheduler.h"
#include "scheduler/step_builder.h"

namespace {
int64_t num_allocations = 0;
}

// Not inlined: else the compiler sees malloc meet delete and warns.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++num_allocations;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace vllm_lite {
namespace {

// Prefix caching, asynchronous scheduling.
struct Allocations : testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(Allocations, SteadyDecodeWithGrowthAndPreemptionAllocatesNothing) {
  const auto [prefix_caching, is_async] = GetParam();
  KvCacheConfig cache_config{.num_blocks = 800, .enable_prefix_caching = prefix_caching};
  SchedulerConfig config;
  config.max_num_seqs = 64;
  config.max_model_len = 512;
  KvCacheManager cache(cache_config);
  Scheduler scheduler(config, cache);
  StepBuilder builder(config, cache_config.block_size);
  SamplingParams sampling;
  std::vector<Sequence> sequences(64);
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence& s = sequences[i];
    s.tokens.assign(30, static_cast<TokenId>(i));
    s.num_prompt_tokens = 30;
    s.max_total_tokens = 400;
    s.sampling = &sampling;
    ASSERT_EQ(scheduler.add(&s), AddResult::kAdded);
  }
  std::vector<TokenId> sampled(64, 5);
  const auto plan = [&](uint64_t id) { builder.build(scheduler.plan(), id); };
  const auto commit = [&] {
    const auto num_samples = static_cast<size_t>(scheduler.step_in_flight(0).num_samples);
    scheduler.commit({sampled.data(), num_samples});
  };
  const auto step = [&](uint64_t id) {
    plan(id);
    commit();
  };
  if (is_async) plan(0);  // from now on a step is in flight when one is planned
  step(1);

  const int64_t before = num_allocations;
  for (uint64_t id = 2; id < 150; ++id) step(id);
  EXPECT_EQ(scheduler.stats().num_preemptions, 0);
  EXPECT_EQ(num_allocations - before, 0);
  // With the pool full the latest are preempted, again and again; they come back into what they
  // had.
  for (uint64_t id = 150; id < 300; ++id) step(id);
  EXPECT_GT(scheduler.stats().num_preemptions, 20);
  EXPECT_EQ(num_allocations - before, 0);
  scheduler.check_invariants();
  EXPECT_GT(num_allocations - before, 0);  // the counter counts
}

INSTANTIATE_TEST_SUITE_P(All, Allocations, testing::Combine(testing::Bool(), testing::Bool()));

}  // namespace
}  // namespace vllm_lite
