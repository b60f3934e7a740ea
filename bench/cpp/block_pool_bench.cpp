// Cost of the KV cache's host part. Its budget: a decode step of 256 sequences takes milliseconds
// on the device, so everything here must stay in the microseconds for the whole batch.
//
// "bytes/s" is the rate of token ids hashed and compared; the rest are rates of blocks or tokens.
#include <benchmark/benchmark.h>

#include <numeric>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "core/hash.h"

namespace vllm_lite {
namespace {

constexpr int32_t kBlockSize = 16;
constexpr int32_t kNumBlocks = 1 << 16;  // a million tokens
constexpr CacheSalt kSalt{};

std::vector<TokenId> some_tokens(int32_t count, TokenId first) {
  std::vector<TokenId> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

void count_rate(benchmark::State& state, const char* name, int64_t per_iteration) {
  state.counters[name] = benchmark::Counter(static_cast<double>(per_iteration),
                                            benchmark::Counter::kIsIterationInvariantRate);
}

void hash_block(benchmark::State& state) {
  const auto tokens = some_tokens(kBlockSize, 1000);
  uint64_t hash = 1;
  for (auto _ : state) benchmark::DoNotOptimize(hash = hash_tokens(hash, tokens));
  state.SetBytesProcessed(state.iterations() * kBlockSize * 4);
}
BENCHMARK(hash_block);

// Fresh blocks without a prefix cache: the pool alone.
void allocate_and_free(benchmark::State& state) {
  const int32_t num_blocks = static_cast<int32_t>(state.range(0));
  KvCacheManager cache(
      {.num_blocks = kNumBlocks, .block_size = kBlockSize, .enable_prefix_caching = false});
  BlockTable table;
  table.reserve(num_blocks);
  for (auto _ : state) {
    if (!cache.grow(table, num_blocks * kBlockSize)) state.SkipWithError("no room");
    cache.release(table);
  }
  count_rate(state, "blocks", num_blocks);
}
BENCHMARK(allocate_and_free)->Arg(1)->Arg(256);

// A prompt of so many tokens, all but the last block cached: hash, confirm, take, give back.
void admit_with_hits(benchmark::State& state) {
  const int32_t num_tokens = static_cast<int32_t>(state.range(0));
  KvCacheManager cache({.num_blocks = kNumBlocks, .block_size = kBlockSize});
  const auto tokens = some_tokens(num_tokens, 1000);
  BlockTable table;
  cache.admit(table, tokens, kSalt, num_tokens);
  cache.mark_computed(table, tokens, kSalt, num_tokens);
  cache.release(table);
  for (auto _ : state) {
    const int32_t cached = cache.admit(table, tokens, kSalt, num_tokens);
    if (cached < num_tokens - kBlockSize) state.SkipWithError("missed");
    cache.release(table);
  }
  count_rate(state, "blocks", num_tokens / kBlockSize);
  state.SetBytesProcessed(state.iterations() * num_tokens * 4);
}
BENCHMARK(admit_with_hits)->Arg(512)->Arg(8192)->Arg(131072);

// A prompt nobody had before, in a full pool: evict, allocate, publish, give back.
void admit_cold_and_publish(benchmark::State& state) {
  const int32_t num_tokens = static_cast<int32_t>(state.range(0));
  KvCacheManager cache({.num_blocks = kNumBlocks, .block_size = kBlockSize});
  auto tokens = some_tokens(num_tokens, 0);
  BlockTable table;
  const auto run = [&] {
    ++tokens[0];
    cache.admit(table, tokens, kSalt, num_tokens);
    cache.mark_computed(table, tokens, kSalt, num_tokens);
    cache.release(table);
  };
  for (int32_t filled = 0; filled <= kNumBlocks; filled += num_tokens / kBlockSize) run();
  for (auto _ : state) run();
  if (cache.stats().prefix_hits != 0) state.SkipWithError("hit");
  count_rate(state, "blocks", num_tokens / kBlockSize);
}
BENCHMARK(admit_cold_and_publish)->Arg(512)->Arg(8192);

// One decode step of a batch: every sequence grows by a token; one in block_size fills a block.
void decode_step(benchmark::State& state) {
  const size_t num_sequences = static_cast<size_t>(state.range(0));
  const int32_t window = static_cast<int32_t>(state.range(1));
  constexpr int32_t kPrompt = 1024;
  constexpr int32_t kLimit = 2048;
  KvCacheManager cache(
      {.num_blocks = kNumBlocks, .block_size = kBlockSize, .sliding_window = window});
  std::vector<BlockTable> tables(num_sequences);
  std::vector<std::vector<TokenId>> tokens(num_sequences);
  int32_t length = kLimit;
  const auto restart = [&] {
    for (size_t i = 0; i < num_sequences; ++i) {
      const int32_t begin = kPrompt + static_cast<int32_t>(i) % kBlockSize;  // out of step
      cache.release(tables[i]);
      tokens[i] = some_tokens(kLimit + kBlockSize, static_cast<TokenId>(i) * 10000);
      cache.admit(tables[i], {tokens[i].data(), static_cast<size_t>(begin)}, kSalt, begin);
      cache.mark_computed(tables[i], tokens[i], kSalt, begin);
    }
    length = kPrompt;
  };
  for (auto _ : state) {
    if (length == kLimit) {
      state.PauseTiming();
      restart();
      state.ResumeTiming();
    }
    ++length;
    for (size_t i = 0; i < num_sequences; ++i) {
      const int32_t total = length + static_cast<int32_t>(i) % kBlockSize;
      if (!cache.grow(tables[i], total)) state.SkipWithError("no room");
      cache.mark_computed(tables[i], tokens[i], kSalt, total);
    }
  }
  count_rate(state, "tokens", state.range(0));
}
BENCHMARK(decode_step)->ArgNames({"sequences", "window"})->Args({256, 0})->Args({256, 512});

}  // namespace
}  // namespace vllm_lite
