// Steady-state decode allocates no heap memory: counted by replacing operator new in this program.

#include <gtest/gtest.h>

#include <cstdlib>
#include <iterator>
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

enum class Mode { kPlain, kAsync, kDrafts };

// With prefix caching or without.
struct Allocations : testing::TestWithParam<std::tuple<bool, Mode>> {};

TEST_P(Allocations, SteadyDecodeWithGrowthAndPreemptionAllocatesNothing) {
  const auto [prefix_caching, mode] = GetParam();
  constexpr TokenId kSampled = 5;
  constexpr TokenId kDrafts[] = {kSampled, kSampled, kSampled + 1, kSampled};  // two are right
  const uint64_t tokens_in_step = mode == Mode::kDrafts ? 3 : 1;
  KvCacheConfig cache_config{.num_blocks = 800, .enable_prefix_caching = prefix_caching};
  SchedulerConfig config;
  config.max_num_seqs = 64;
  config.max_model_len = 512;
  config.num_speculative_tokens = mode == Mode::kDrafts ? std::size(kDrafts) : 0;
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
    s.drafts.reserve(std::size(kDrafts));
    ASSERT_EQ(scheduler.add(&s), AddResult::kAdded);
  }
  std::vector<TokenId> sampled(64 * (1 + std::size(kDrafts)), kSampled);
  const auto plan = [&](uint64_t id) {
    if (mode == Mode::kDrafts) {
      for (Sequence& s : sequences) s.drafts.assign(std::begin(kDrafts), std::end(kDrafts));
    }
    builder.build(scheduler.plan(), id);
  };
  const auto commit = [&] {
    const auto num_logits = static_cast<size_t>(scheduler.step_in_flight(0).num_logits());
    scheduler.commit({sampled.data(), num_logits});
  };
  const auto step = [&](uint64_t id) {
    plan(id);
    commit();
  };
  if (mode == Mode::kAsync) plan(0);  // from now on a step is in flight when one is planned
  step(1);

  const int64_t before = num_allocations;
  uint64_t id = 2;
  while (id * tokens_in_step < 150) step(id++);
  EXPECT_EQ(scheduler.stats().num_preemptions, 0);
  EXPECT_EQ(num_allocations - before, 0);
  // With the pool full the latest are preempted, again and again; they come back into what they
  // had.
  while (id * tokens_in_step < 300) step(id++);
  EXPECT_GT(scheduler.stats().num_preemptions, 20);
  EXPECT_EQ(num_allocations - before, 0);
  EXPECT_EQ(scheduler.stats().num_accepted_tokens > 5000, mode == Mode::kDrafts);
  scheduler.check_invariants();
  EXPECT_GT(num_allocations - before, 0);  // the counter counts
}

INSTANTIATE_TEST_SUITE_P(
    All, Allocations,
    testing::Combine(testing::Bool(), testing::Values(Mode::kPlain, Mode::kAsync, Mode::kDrafts)));

}  // namespace
}  // namespace vllm_lite
