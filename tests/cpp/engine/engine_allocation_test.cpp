// A step in the steady state allocates nothing but what its outputs need: counted by replacing
// operator new in this program.
#include <cstdlib>
#include <new>

#include "engine_fixture.h"

namespace {
thread_local int64_t num_allocations = 0;
}  // namespace

// Not inlined: GCC would see malloc meet delete and warn.
[[gnu::noinline]] void* operator new(size_t size) {
  ++num_allocations;
  if (void* const memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace vllm_lite::testing {
namespace {

enum class Mode { kPlain, kAsync, kSpeculative };

struct EngineAllocations : EngineTest, ::testing::WithParamInterface<Mode> {
  EngineAllocations() {
    config_.async_scheduling = GetParam() == Mode::kAsync;
    config_.scheduler.num_speculative_tokens = GetParam() == Mode::kSpeculative ? 2 : 0;
    config_.scheduler.max_num_seqs = 32;
    config_.scheduler.max_num_batched_tokens = 512;
    config_.scheduler.max_model_len = 400;
    config_.cache = {.num_blocks = 1024, .block_size = 16};
    for (TokenId i = 0; i < 32; ++i) {
      RequestInput input = endless(12, 380, i);
      input.stops = {"a stop string that does not come", "\n\nAssistant:"};
      if (i % 4 == 0) input.sampling.row.num_logprobs = 5;
      core().submit(input);
    }
  }

  // Steps of the engine core; the worker and the client are not counted.
  int64_t count_allocations(int32_t num_steps, bool take_outputs) {
    int64_t count = 0;
    for (int32_t i = 0; i < num_steps; ++i) {
      int64_t before = num_allocations;
      const auto plan = core().begin_step();
      count += num_allocations - before;
      // Nothing can be planned ahead where all wait for a result.
      if (!plan.empty()) engine().plans.emplace_back(plan.begin(), plan.end());
      if (!plan.empty() && core().num_outstanding() < core().max_outstanding()) continue;
      const std::vector<int32_t> result = engine().worker.execute(engine().plans.front());
      engine().plans.pop_front();
      before = num_allocations;
      core().finish_step(result);
      count += num_allocations - before;
      if (take_outputs) engine().take_outputs();
    }
    return count;
  }
};

TEST_P(EngineAllocations, NoneWithAClientThatKeepsUp) {
  EXPECT_GT(count_allocations(100, true), 32);  // the counter counts
  // A message that is a little longer than any before may grow the buffers, hardly ever; more often
  // where they differ by accepted drafts.
  EXPECT_LE(count_allocations(250, true), GetParam() == Mode::kSpeculative ? 60 : 10);
  EXPECT_EQ(core().stats().num_draft_tokens > 10000, GetParam() == Mode::kSpeculative);
}

TEST_P(EngineAllocations, OnlyTheOutboxGrowsForASlowClient) {
  count_allocations(100, true);
  EXPECT_LE(count_allocations(250, false), 20);  // by doubling, to a megabyte
  engine().take_outputs();
  EXPECT_EQ(engine().clients[0].stats.num_running, 32);
}

TEST_P(EngineAllocations, BeamsFindTheirMemoryAtAdmission) {
  for (RequestKey key = 1; key <= 32; ++key) core().abort(make_key(0, key));
  for (TokenId i = 0; i < 4; ++i) {
    RequestInput input = endless(12, 380, i);
    input.beam_search.width = 8;
    input.sampling.row.num_logprobs = 8;
    core().submit(input);
  }
  count_allocations(100, true);
  EXPECT_EQ(engine().clients[0].stats.num_running, 4);
  // The trees of their tokens grow by doubling.
  EXPECT_LE(count_allocations(250, true), 20);
}

INSTANTIATE_TEST_SUITE_P(Modes, EngineAllocations,
                         ::testing::Values(Mode::kPlain, Mode::kAsync, Mode::kSpeculative));

}  // namespace
}  // namespace vllm_lite::testing
