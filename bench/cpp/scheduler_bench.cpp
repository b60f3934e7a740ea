// Cost of the engine core's own work in a step. Target: 30 us for a decode step of 256 sequences.
//
// Bound: a decode step reads and writes about six cache lines of each sequence (list hook and
// counters, block table, last token) and 8 words of the plan; with everything in L2 that is some 30
// ns a sequence.

#include <benchmark/benchmark.h>

#include "scheduler_scenario.h"

namespace vllm_lite {
namespace {

void BM_StepDecode(benchmark::State& state) {
  DecodeScenario scenario(static_cast<int32_t>(state.range(0)));
  for (auto _ : state) {
    if (scenario.needs_reset()) {
      state.PauseTiming();
      scenario.reset();
      state.ResumeTiming();
    }
    benchmark::DoNotOptimize(scenario.step());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(scenario.num_words()) * 4);
}
BENCHMARK(BM_StepDecode)->Arg(1)->Arg(16)->Arg(64)->Arg(256)->Arg(1024);

// A prompt of range(0) tokens: add, plan, build, commit, finish. With prefix caching `hit` says
// whether all its whole blocks but the last are found, or none is.
void admit(benchmark::State& state, bool hit) {
  const auto prompt = static_cast<int32_t>(state.range(0));
  KvCacheConfig cache_config{.num_blocks = 4 * prompt};
  SchedulerConfig config;
  config.max_num_batched_tokens = prompt;
  config.max_model_len = prompt + 2;
  KvCacheManager cache(cache_config);
  Scheduler scheduler(config, cache);
  StepBuilder builder(config, cache_config.block_size);
  SamplingParams sampling;
  Sequence sequence;
  TokenId first = 0;
  const TokenId sampled = 5;
  for (auto _ : state) {
    sequence.state = SequenceState::kNew;
    sequence.tokens.resize(static_cast<size_t>(prompt));
    if (!hit) sequence.tokens[0] = ++first;
    sequence.num_prompt_tokens = prompt;
    sequence.max_total_tokens = prompt + 2;
    sequence.sampling = &sampling;
    scheduler.add(&sequence);
    benchmark::DoNotOptimize(builder.build(scheduler.plan(), 1));
    scheduler.commit({&sampled, 1});
    scheduler.finish(&sequence);
  }
  state.SetItemsProcessed(state.iterations() * prompt);
}
void BM_Admit(benchmark::State& state) { admit(state, false); }
void BM_PrefixHitAdmit(benchmark::State& state) { admit(state, true); }
BENCHMARK(BM_Admit)->Arg(128)->Arg(2048)->Arg(32768);
BENCHMARK(BM_PrefixHitAdmit)->Arg(128)->Arg(2048)->Arg(32768);

}  // namespace
}  // namespace vllm_lite
