#include "cache/kv_cache_manager.h"

#include <algorithm>
#include <bit>

#include "cache/prefix_index.h"
#include "core/check.h"

namespace vllm_lite {
namespace {

size_t index_of(int32_t i) { return static_cast<size_t>(i); }

int32_t size_of(const BlockTable& table) { return static_cast<int32_t>(table.blocks.size()); }

std::span<const TokenId> tokens_of_block(std::span<const TokenId> tokens, int32_t i,
                                         int32_t block_size) {
  return tokens.subspan(index_of(i) * index_of(block_size), index_of(block_size));
}

KvCacheConfig checked(const KvCacheConfig& config) {
  const auto text = [](int32_t value) { return std::to_string(value); };
  VL_CHECK(config.num_blocks >= 1, "num_blocks=" + text(config.num_blocks) +
                                       ": must be at least 1; give the KV cache more memory");
  VL_CHECK(config.block_size >= 1 && std::has_single_bit(static_cast<uint32_t>(config.block_size)),
           "block_size=" + text(config.block_size) + ": must be a power of two, such as 16");
  VL_CHECK(config.sliding_window >= 0,
           "sliding_window=" + text(config.sliding_window) + ": must be 0 (none) or more");
  return config;
}

}  // namespace

KvCacheManager::KvCacheManager(const KvCacheConfig& config) : KvCacheManager(config, 64) {}

KvCacheManager::KvCacheManager(const KvCacheConfig& config, int32_t hash_bits)
    : config_(checked(config)),
      pool_(std::make_unique<BlockPool>(config.num_blocks)),
      index_(config.enable_prefix_caching
                 ? std::make_unique<PrefixIndex>(config.num_blocks, config.block_size, hash_bits)
                 : nullptr) {}

KvCacheManager::~KvCacheManager() = default;

int32_t KvCacheManager::num_blocks() const { return config_.num_blocks; }
int32_t KvCacheManager::block_size() const { return config_.block_size; }
int32_t KvCacheManager::num_available_blocks() const { return pool_->num_available(); }
int32_t KvCacheManager::num_used_blocks() const { return num_blocks() - pool_->num_available(); }
int32_t KvCacheManager::blocks_for(int32_t num_tokens) const {
  return ceil_div(num_tokens, config_.block_size);
}
const KvCacheStats& KvCacheManager::stats() const { return stats_; }

// Before anything else changes, so that running out of memory leaves everything as it was.
void KvCacheManager::make_room(BlockTable& table, int32_t num_blocks) const {
  if (table.blocks.capacity() >= index_of(num_blocks)) return;
  table.blocks.reserve(std::max(index_of(num_blocks), 2 * table.blocks.capacity()));
}

BlockId KvCacheManager::take_block() {
  if (pool_->num_free() == 0) {
    index_->forget(pool_->evict());  // only an index makes blocks cached
    ++stats_.evictions;
  }
  return pool_->allocate();
}

// From a block that leaves the window the sequence goes on: it goes just below its parent in the
// LRU order, so that eviction eats this prefix, too, from its tail although its head comes back
// first.
void KvCacheManager::give_back(BlockId block, bool out_of_window) {
  if (pool_->ref_count(block) > 1 || !index_) {
    pool_->unref(block, false);
    return;
  }
  const BlockId findable = index_->settle(block);
  if (findable == block) {
    pool_->unref(block, true, out_of_window ? index_->parent_of(block) : kNoBlock);
    return;
  }
  pool_->unref(block, false);
  index_->forget(block);
  // The equal block that stays was used too: it must not be evicted before the blocks after it.
  if (findable != kNoBlock && !out_of_window) pool_->touch(findable);
}

// Leading blocks that no query from token num_computed on sees; one token later than the window
// says, since a fork computes the last token again for its logits. The last full block always
// stays: it names the place of the block after it.
int32_t KvCacheManager::num_out_of_window(int32_t num_computed) const {
  if (config_.sliding_window == 0) return 0;
  const int32_t kept_tokens = std::max(config_.sliding_window, config_.block_size);
  return std::max(0, num_computed - kept_tokens) / config_.block_size;
}

int32_t KvCacheManager::admit(BlockTable& table, std::span<const TokenId> tokens,
                              const CacheSalt& salt, int32_t num_tokens, int32_t headroom,
                              int32_t min_awaited_tokens, int32_t max_hit_tokens) {
  VL_ASSERT(table.blocks.empty());
  VL_ASSERT(num_tokens >= 0 && headroom >= 0);
  const int32_t total = blocks_for(num_tokens);
  const int32_t most_hits =
      index_ && !tokens.empty()
          ? std::min(static_cast<int32_t>(tokens.size()) - 1, max_hit_tokens) / block_size()
          : 0;
  make_room(table, std::max(total, most_hits));
  table.awaited_block = kNoBlock;
  if (most_hits > 0) {
    PrefixLink place = index_->root(salt);
    BlockId last_coming = kNoBlock;
    int32_t num_coming = 0;
    for (int32_t i = 0; i < most_hits; ++i) {
      const BlockId block = index_->find(place, tokens_of_block(tokens, i, block_size()), salt);
      if (block == kNoBlock) break;
      if (index_->coming(block)) {
        if (min_awaited_tokens == 0) break;
        last_coming = block;
        ++num_coming;
      } else if (num_coming == 0) {
        table.blocks.push_back(block);
      }
      place = index_->link(block);
    }
    if (num_coming > 0 && num_coming >= ceil_div(min_awaited_tokens, block_size())) {
      table.blocks.clear();
      table.awaited_block = last_coming;
      table.awaited_generation = pool_->generation(last_coming);
      return kAwaits;
    }
  }

  const int32_t hits = size_of(table);
  const int32_t skipped = num_out_of_window(hits * block_size());
  // A hit that nobody holds stops being available when it is taken.
  int64_t taken = std::max(0, total - hits);
  for (int32_t i = skipped; i < hits; ++i) {
    taken += pool_->state(table.blocks[index_of(i)]) == BlockState::kCached;
  }
  if (taken + headroom > num_available_blocks()) {
    table.blocks.clear();
    return kNoRoom;
  }

  // All hits are held before the first fresh block is taken: that may evict.
  for (int32_t i = skipped; i < hits; ++i) pool_->ref(table.blocks[index_of(i)]);
  for (int32_t i = skipped - 1; i >= 0; --i) {
    pool_->touch(table.blocks[index_of(i)]);
    table.blocks[index_of(i)] = kNoBlock;
  }
  while (size_of(table) < total) table.blocks.push_back(take_block());
  table.num_published = hits;
  table.num_hit_blocks = hits;
  table.num_out_of_window = skipped;
  if (index_) {
    announce(table, tokens, salt);
    stats_.prefix_queries += static_cast<int64_t>(tokens.size());
    stats_.prefix_hits += static_cast<int64_t>(hits) * block_size();
  }
  return hits * block_size();
}

bool KvCacheManager::awaits(const BlockTable& table) const {
  const BlockId block = table.awaited_block;
  return block != kNoBlock && index_->coming(block) &&
         pool_->generation(block) == table.awaited_generation;
}

// Whoever holds the table computes all its tokens unless it gives the blocks back, which ends what
// is announced of them.
void KvCacheManager::announce(const BlockTable& table, std::span<const TokenId> tokens,
                              const CacheSalt& salt) {
  const int32_t num_full = static_cast<int32_t>(tokens.size()) / block_size();
  const int32_t first = table.num_published;
  PrefixLink place =
      first == 0 ? index_->root(salt) : index_->link(table.blocks[index_of(first - 1)]);
  for (int32_t i = first; i < std::min(num_full, size_of(table)); ++i) {
    const BlockId block = table.blocks[index_of(i)];
    place = index_->announce(block, pool_->generation(block), place,
                             tokens_of_block(tokens, i, block_size()), salt);
  }
}

bool KvCacheManager::grow(BlockTable& table, int32_t num_tokens) {
  const int32_t total = blocks_for(num_tokens);
  if (total - size_of(table) > num_available_blocks()) return false;
  make_room(table, total);
  while (size_of(table) < total) table.blocks.push_back(take_block());
  return true;
}

void KvCacheManager::shrink(BlockTable& table, int32_t num_tokens) {
  const int32_t total = blocks_for(num_tokens);
  VL_ASSERT(total >= std::max(table.num_published, table.num_out_of_window));
  while (size_of(table) > total) {
    give_back(table.blocks.back(), false);
    table.blocks.pop_back();
  }
}

void KvCacheManager::mark_computed(BlockTable& table, std::span<const TokenId> tokens,
                                   const CacheSalt& salt, int32_t num_computed) {
  const int32_t num_full = num_computed / block_size();
  VL_ASSERT(num_computed >= 0 && index_of(num_computed) <= tokens.size());
  VL_ASSERT(blocks_for(num_computed) <= size_of(table));
  if (index_) {
    for (int32_t i = table.num_published; i < num_full; ++i) {
      const BlockId block = table.blocks[index_of(i)];
      const PrefixLink place =
          i == 0 ? index_->root(salt) : index_->link(table.blocks[index_of(i - 1)]);
      index_->offer(block, pool_->generation(block), place,
                    tokens_of_block(tokens, i, block_size()), salt);
    }
    table.num_published = std::max(table.num_published, num_full);
  }
  const int32_t end = num_out_of_window(num_computed);
  for (; table.num_out_of_window < end; ++table.num_out_of_window) {
    BlockId& block = table.blocks[index_of(table.num_out_of_window)];
    give_back(block, true);
    block = kNoBlock;
  }
}

bool KvCacheManager::fork(const BlockTable& parent, BlockTable& child, int32_t num_tokens,
                          std::vector<BlockCopy>& copies) {
  VL_ASSERT(child.blocks.empty());
  VL_ASSERT(num_tokens >= 0 && blocks_for(num_tokens) <= size_of(parent));
  const int32_t num_whole = num_tokens / block_size();
  const bool has_partial = num_tokens % block_size() != 0;
  if (has_partial && num_available_blocks() == 0) return false;
  if (config_.sliding_window > 0) {
    const int32_t seen = std::max(config_.sliding_window - 1, block_size());
    if (parent.num_out_of_window > std::max(0, num_tokens - seen) / block_size()) return false;
  }

  make_room(child, blocks_for(num_tokens));
  if (has_partial) copies.push_back({parent.blocks[index_of(num_whole)], kNoBlock});
  for (int32_t i = 0; i < num_whole; ++i) {
    const BlockId block = parent.blocks[index_of(i)];
    if (block != kNoBlock) pool_->ref(block);
    child.blocks.push_back(block);
  }
  if (has_partial) {
    BlockCopy& copy = copies.back();
    copy.destination = take_block();
    if (index_ && index_->barred(copy.source)) index_->bar(copy.destination);
    child.blocks.push_back(copy.destination);
  }
  child.num_published = std::min(parent.num_published, num_whole);
  child.num_out_of_window = parent.num_out_of_window;
  child.num_hit_blocks = 0;
  return true;
}

void KvCacheManager::release(BlockTable& table) {
  const int32_t skipped = table.num_out_of_window;
  // What was given back earlier belongs to the same prefix and counts as used with it.
  BlockId ancestor = kNoBlock;
  if (index_ && skipped > 0 && skipped < size_of(table)) {
    ancestor = index_->parent_of(table.blocks[index_of(skipped)]);
  }
  for (int32_t i = size_of(table) - 1; i >= skipped; --i)
    give_back(table.blocks[index_of(i)], false);
  for (; ancestor != kNoBlock; ancestor = index_->parent_of(ancestor)) pool_->touch(ancestor);
  table.blocks.clear();
  table.num_published = table.num_out_of_window = table.num_hit_blocks = 0;
}

void KvCacheManager::reset_prefix_cache() {
  if (!index_) return;
  while (pool_->num_cached() > 0) index_->forget(pool_->evict());
  for (BlockId block = 0; block < num_blocks(); ++block) {
    if (pool_->state(block) == BlockState::kInUse) index_->bar(block);
  }
}

void KvCacheManager::check_invariants(std::span<const BlockTable* const> tables) const {
  std::vector<int32_t> ref_counts(index_of(num_blocks()), 0);
  for (const BlockTable* table : tables) {
    check_table(*table);
    for (BlockId block : table->blocks) {
      if (block != kNoBlock) ++ref_counts[index_of(block)];
    }
  }
  pool_->check_invariants(ref_counts);
  if (!index_) {
    VL_ASSERT(pool_->num_cached() == 0);
    return;
  }
  index_->check_invariants();
  for (BlockId block = 0; block < num_blocks(); ++block) {
    const BlockState state = pool_->state(block);
    if (state == BlockState::kCached) VL_ASSERT(index_->findable(block));
    if (index_->coming(block)) VL_ASSERT(state == BlockState::kInUse);
    if (state == BlockState::kFree) {
      VL_ASSERT(index_->link(block).content == kNoContent && !index_->barred(block));
    }
  }
}

void KvCacheManager::check_table(const BlockTable& table) const {
  VL_ASSERT(table.num_published >= 0 && table.num_published <= size_of(table));
  VL_ASSERT(table.num_hit_blocks >= 0 && table.num_hit_blocks <= table.num_published);
  VL_ASSERT(table.num_out_of_window >= 0 && table.num_out_of_window <= size_of(table));
  VL_ASSERT(table.num_out_of_window == 0 || config_.sliding_window > 0);
  VL_ASSERT(index_ || table.num_published == 0);
  VL_ASSERT(!index_ || table.num_out_of_window == 0 ||
            table.num_out_of_window < table.num_published);
  for (int32_t i = 0; i < size_of(table); ++i) {
    const BlockId block = table.blocks[index_of(i)];
    if (i < table.num_out_of_window) {
      VL_ASSERT(block == kNoBlock);
      continue;
    }
    VL_ASSERT(block >= 0 && block < num_blocks());
    if (!index_ || i >= table.num_published) continue;
    VL_ASSERT(!index_->coming(block));
    // A name in the table says what comes before it, and nothing comes after a block without one.
    const ContentId before = index_->parent_content(block);
    if (before == kNoContent) continue;
    if (i == 0) VL_ASSERT(before == kRootContent);
    if (i > table.num_out_of_window) {
      VL_ASSERT(before == index_->link(table.blocks[index_of(i - 1)]).content);
    }
  }
}

}  // namespace vllm_lite
