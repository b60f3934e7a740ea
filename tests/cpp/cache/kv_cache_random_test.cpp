// Random operations against a reference model, and against what the memory would really hold.
#include <algorithm>
#include <list>
#include <ostream>
#include <random>

#include "cache_test_util.h"
#include "reference_cache.h"

namespace vllm_lite {
namespace {

struct Case {
  KvCacheConfig config;
  int32_t hash_bits;
  friend std::ostream& operator<<(std::ostream& out, const Case& c) {
    return out << c.config.num_blocks << " blocks of " << c.config.block_size << ", window "
               << c.config.sliding_window << ", caching " << c.config.enable_prefix_caching
               << ", hash bits " << c.hash_bits;
  }
};

// What one slot holds: KV of the last token of `prefix`, computed by the weights of `epoch` (the
// oldest of those that anything before it was computed by).
struct Slot {
  int64_t epoch = -1;
  CacheSalt salt{};
  Tokens prefix;
  bool operator==(const Slot&) const = default;
};

struct Running {
  Tokens tokens;
  CacheSalt salt{};
  int32_t computed = 0;
  int64_t epoch = 0;
  BlockTable table;
  ReferenceCache::Table reference;
};

class World {
 public:
  World(const Case& test_case, uint32_t seed)
      : config_(test_case.config),
        cache_(KvCacheManagerPeer::create(config_, test_case.hash_bits)),
        reference_(config_),
        memory_(static_cast<size_t>(config_.num_blocks * config_.block_size)),
        random_(seed) {}

  void step() {
    const int32_t action = below(100);
    if (running_.empty() || action < 20) {
      admit();
    } else if (action < 70) {
      compute(any());
    } else if (action < 80) {
      fork(any());
    } else if (action < 98) {
      release(any());
    } else {
      cache_->reset_prefix_cache();
      reference_.reset();
      ++epoch_;
    }
    compare();
  }

  void finish() {
    while (!running_.empty()) {
      release(running_.begin());
      compare();
    }
    EXPECT_EQ(cache_->num_used_blocks(), 0);
  }

  int64_t num_hits() const { return cache_->stats().prefix_hits; }
  int64_t num_evictions() const { return cache_->stats().evictions; }
  int64_t num_awaited() const { return num_awaited_; }

 private:
  using Iterator = std::list<Running>::iterator;

  int32_t below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint32_t>(n)); }
  Iterator any() {
    return std::next(running_.begin(), below(static_cast<int32_t>(running_.size())));
  }
  Slot& slot(const Running& sequence, int32_t position) {
    const BlockId block = sequence.table.blocks[static_cast<size_t>(position / config_.block_size)];
    EXPECT_NE(block, kNoBlock);
    return memory_[static_cast<size_t>(block * config_.block_size + position % config_.block_size)];
  }
  int32_t first_seen(int32_t query) const {
    return config_.sliding_window == 0 ? 0 : std::max(0, query - config_.sliding_window + 1);
  }
  Slot expected(const Running& sequence, int32_t position) const {
    return {sequence.epoch, sequence.salt,
            Tokens(sequence.tokens.begin(), sequence.tokens.begin() + position + 1)};
  }

  // Few tokens and few salts, so that prefixes meet often.
  void admit() {
    Running sequence;
    const int32_t count = 1 + below(config_.block_size * config_.num_blocks * 2 / 3);
    for (int32_t i = 0; i < count; ++i) sequence.tokens.push_back(below(12) == 0 ? below(3) : 7);
    sequence.salt = {0, below(8) == 0 ? 1u : 0u};
    sequence.epoch = epoch_;
    const int32_t num_tokens = count + below(4);
    const int32_t headroom = below(3);
    const int32_t min_awaited = below(5) == 0 ? 0 : 1 + below(2 * config_.block_size);
    const KvCacheStats before = cache_->stats();
    const int32_t cached = cache_->admit(sequence.table, sequence.tokens, sequence.salt, num_tokens,
                                         headroom, min_awaited);
    const int32_t wanted =
        reference_.admit(sequence.reference, sequence.tokens, sequence.salt, num_tokens, headroom,
                         min_awaited, sequence.table.blocks);
    ASSERT_EQ(cached, wanted);
    ASSERT_EQ(cache_->awaits(sequence.table), cached == KvCacheManager::kAwaits);
    ASSERT_LT(cached, count);
    const bool counted = cached >= 0 && config_.enable_prefix_caching;
    ASSERT_EQ(cache_->stats().prefix_queries - before.prefix_queries, counted ? count : 0);
    ASSERT_EQ(cache_->stats().prefix_hits - before.prefix_hits, counted ? cached : 0);
    if (cached < 0) {
      ASSERT_TRUE(sequence.table.blocks.empty());
      if (cached == KvCacheManager::kAwaits) {
        ++num_awaited_;
        awaiting_.push_back(std::move(sequence));
        if (awaiting_.size() > 8) awaiting_.pop_front();
      }
      return;
    }
    ASSERT_EQ(sequence.table.num_hit_blocks * config_.block_size, cached);
    sequence.computed = cached;
    running_.push_back(std::move(sequence));
  }

  // Computes some tokens: the KV goes into memory, then the cache is told.
  void compute(Iterator it) {
    Running& sequence = *it;
    if (sequence.computed == length(sequence.tokens)) {
      sequence.tokens.push_back(below(2));
    }
    const int32_t target =
        sequence.computed + 1 + below(length(sequence.tokens) - sequence.computed);
    const bool grown = cache_->grow(sequence.table, target);
    ASSERT_EQ(grown, reference_.grow(sequence.reference, target, sequence.table.blocks));
    if (!grown) {
      release(it);  // a preemption
      return;
    }
    for (; sequence.computed < target; ++sequence.computed) {
      slot(sequence, sequence.computed) = expected(sequence, sequence.computed);
    }
    cache_->mark_computed(sequence.table, sequence.tokens, sequence.salt, target);
    reference_.mark_computed(sequence.reference, sequence.tokens, sequence.salt, target);
  }

  void fork(Iterator it) {
    const Running& parent = *it;
    const int32_t back = below(3) == 0 ? below(parent.computed + 1) : below(2);
    const int32_t num_tokens = std::max(0, parent.computed - back);
    if (num_tokens == 0) return;
    Running child;
    std::vector<BlockCopy> copies;
    const bool forked = cache_->fork(parent.table, child.table, num_tokens, copies);
    ASSERT_EQ(forked,
              reference_.fork(parent.reference, child.reference, num_tokens, child.table.blocks));
    ASSERT_EQ(copies.size(), forked && num_tokens % config_.block_size != 0 ? 1u : 0u);
    if (!forked) return;
    for (const BlockCopy& copy : copies) {
      ASSERT_EQ(copy.destination, child.table.blocks.back());
      std::copy_n(memory_.begin() + copy.source * config_.block_size, config_.block_size,
                  memory_.begin() + copy.destination * config_.block_size);
    }
    child.tokens.assign(parent.tokens.begin(), parent.tokens.begin() + num_tokens);
    child.tokens.push_back(below(2));
    child.salt = parent.salt;
    child.epoch = parent.epoch;
    child.computed = num_tokens;
    running_.push_back(std::move(child));
  }

  void release(Iterator it) {
    cache_->release(it->table);
    reference_.release(it->reference);
    running_.erase(it);
  }

  void compare() {
    std::vector<const BlockTable*> tables;
    for (Running& sequence : running_) {
      tables.push_back(&sequence.table);
      ASSERT_EQ(sequence.table.blocks, sequence.reference.blocks);
      ASSERT_EQ(sequence.table.num_published, sequence.reference.published);
      // The next query sees exactly this sequence's own tokens, hits and copies included.
      for (int32_t i = first_seen(sequence.computed); i < sequence.computed; ++i) {
        ASSERT_EQ(slot(sequence, i), expected(sequence, i)) << "position " << i;
      }
    }
    for (const Running& sequence : awaiting_) {
      ASSERT_EQ(cache_->awaits(sequence.table), reference_.awaits(sequence.reference));
    }
    ASSERT_EQ(cache_->num_available_blocks(), reference_.num_available());
    ASSERT_EQ(cache_->stats().evictions, reference_.num_evictions());
    ASSERT_NO_THROW(cache_->check_invariants(tables));
  }

  const KvCacheConfig config_;
  std::unique_ptr<KvCacheManager> cache_;
  ReferenceCache reference_;
  std::vector<Slot> memory_;  // [num_blocks, block_size]
  std::list<Running> running_;
  std::list<Running> awaiting_;  // the last ones that were told to wait
  std::mt19937 random_;
  int64_t epoch_ = 0;
  int64_t num_awaited_ = 0;
};

class KvCacheRandom : public testing::TestWithParam<Case> {};

TEST_P(KvCacheRandom, DoesWhatTheReferenceDoesAndEveryHitHoldsItsTokens) {
  int64_t num_hits = 0;
  int64_t num_evictions = 0;
  int64_t num_awaited = 0;
  for (uint32_t seed = 0; seed < 10; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    World world(GetParam(), seed);
    for (int i = 0; i < 1200; ++i) {
      world.step();
      if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << "in step " << i;
    }
    world.finish();
    num_hits += world.num_hits();
    num_evictions += world.num_evictions();
    num_awaited += world.num_awaited();
  }
  // The test must have been about something.
  const bool caching = GetParam().config.enable_prefix_caching;
  EXPECT_EQ(num_hits > 1000, caching);
  EXPECT_EQ(num_evictions > 1000, caching);
  EXPECT_EQ(num_awaited > 20, caching) << num_awaited;
}

constexpr KvCacheConfig config(int32_t num_blocks, int32_t block_size, int32_t window = 0,
                               bool caching = true) {
  return {num_blocks, block_size, caching, window};
}

INSTANTIATE_TEST_SUITE_P(Pools, KvCacheRandom,
                         testing::Values(Case{config(8, 2), 64}, Case{config(24, 2), 64},
                                         Case{config(16, 1), 64}, Case{config(12, 4), 64},
                                         Case{config(20, 2), 4}, Case{config(20, 2), 0},
                                         Case{config(12, 2, 0, false), 64},
                                         Case{config(12, 2, 5), 64}, Case{config(24, 2, 7), 64},
                                         Case{config(16, 1, 3), 2}, Case{config(12, 4, 1), 64},
                                         Case{config(12, 4, 9), 64},
                                         Case{config(12, 2, 5, false), 64}));

}  // namespace
}  // namespace vllm_lite
