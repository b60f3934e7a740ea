// A slow, obvious KV cache to compare the real one with: linear searches, whole prefixes by value.
//
// It follows the same rules, but takes over which blocks the real one chose and judges the choice:
// a fresh block must have been free, or, if none was, the least recently used cached one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "cache_test_util.h"

namespace vllm_lite {

class ReferenceCache {
 public:
  struct Table {
    Blocks blocks;
    int32_t published = 0;
    BlockId awaited = kNoBlock;
    int64_t awaited_name = 0;
  };

  ReferenceCache(const KvCacheConfig& config) : config_(config) {
    for (BlockId block = 0; block < config.num_blocks; ++block) free_.insert(block);
  }

  int32_t num_available() const { return static_cast<int32_t>(free_.size() + lru_.size()); }
  int64_t num_evictions() const { return num_evictions_; }

  // What admit must return.
  int32_t admit(Table& table, const Tokens& tokens, const CacheSalt& salt, int32_t num_tokens,
                int32_t headroom, int32_t min_awaited, const Blocks& chosen) {
    Blocks hits;
    Blocks coming;
    int64_t parent = kRoot;
    while (config_.enable_prefix_caching) {
      const size_t i = hits.size() + coming.size();
      if ((i + 1) * block_size() >= tokens.size()) break;
      const BlockId block = find_or_coming(key_of(parent, salt, tokens, i));
      if (block == kNoBlock) break;
      if (contents_.at(block).coming) {
        coming.push_back(block);
      } else {
        EXPECT_TRUE(coming.empty()) << "nobody computes a block before the one before it";
        hits.push_back(block);
      }
      parent = contents_.at(block).name;
    }
    table.awaited = kNoBlock;
    const auto num_awaited = static_cast<int32_t>(coming.size() * block_size());
    if (min_awaited > 0 && num_awaited >= min_awaited) {
      table.awaited = coming.back();
      table.awaited_name = contents_.at(coming.back()).name;
      return KvCacheManager::kAwaits;
    }
    const int32_t num_hits = static_cast<int32_t>(hits.size());
    const int32_t hit_tokens = num_hits * config_.block_size;
    int32_t taken = std::max(0, ceil_div(num_tokens, config_.block_size) - num_hits);
    for (int32_t i = 0; i < num_hits; ++i) {
      if (kept(i, hit_tokens) && is_cached(hits[at(i)])) ++taken;
    }
    if (taken + headroom > num_available()) return KvCacheManager::kNoRoom;
    for (int32_t i = 0; i < num_hits; ++i) {
      if (kept(i, hit_tokens)) hold(hits[at(i)]);
    }
    for (int32_t i = num_hits - 1; i >= 0; --i) {
      if (kept(i, hit_tokens)) continue;
      touch(hits[at(i)]);
      hits[at(i)] = kNoBlock;
    }
    table.blocks = hits;
    table.published = num_hits;
    take_fresh(table, num_tokens, chosen);
    announce(table, tokens, salt);
    return hit_tokens;
  }

  // Whether what admit said to wait for is still only coming.
  bool awaits(const Table& table) const {
    const auto found = contents_.find(table.awaited);
    return found != contents_.end() && found->second.coming &&
           found->second.name == table.awaited_name;
  }

  bool grow(Table& table, int32_t num_tokens, const Blocks& chosen) {
    const size_t total = at(ceil_div(num_tokens, config_.block_size));
    if (total > table.blocks.size() + at(num_available())) return false;
    take_fresh(table, num_tokens, chosen);
    return true;
  }

  void mark_computed(Table& table, const Tokens& tokens, const CacheSalt& salt, int32_t computed) {
    const int32_t full = computed / config_.block_size;
    for (; config_.enable_prefix_caching && table.published < full; ++table.published) {
      const size_t i = at(table.published);
      const BlockId block = table.blocks[i];
      if (barred_.contains(block)) continue;
      if (contents_.contains(block) && !contents_.at(block).coming) continue;
      contents_.erase(block);
      if (i > 0 && !contents_.contains(table.blocks[i - 1])) continue;
      const int64_t parent = i == 0 ? kRoot : contents_.at(table.blocks[i - 1]).name;
      const Key key = key_of(parent, salt, tokens, i);
      const BlockId equal = find(key);
      // Who was only about to compute the same has it no longer to itself, but gave it its name.
      const BlockId coming = equal == kNoBlock ? find_or_coming(key) : kNoBlock;
      const BlockId named_by = equal != kNoBlock ? equal : coming;
      const int64_t name = named_by == kNoBlock ? names_.at(block) : contents_.at(named_by).name;
      if (coming != kNoBlock) contents_.erase(coming);
      // The block that stands for the parent now, whose place in the LRU order the block goes
      // below.
      const BlockId parent_block = i == 0 ? kNoBlock : standing_for(table.blocks[i - 1]);
      contents_[block] = {key, name, equal == kNoBlock, false, equal, parent_block};
    }
    for (int32_t i = 0; i < static_cast<int32_t>(table.blocks.size()); ++i) {
      if (i * config_.block_size >= computed || kept(i, computed)) break;
      if (table.blocks[at(i)] == kNoBlock) continue;
      let_go(table.blocks[at(i)], true);
      table.blocks[at(i)] = kNoBlock;
    }
  }

  bool fork(const Table& parent, Table& child, int32_t num_tokens, const Blocks& chosen) {
    const int32_t whole = num_tokens / config_.block_size;
    const bool partial = num_tokens % config_.block_size != 0;
    if (partial && (num_available() == 0 || parent.blocks[at(whole)] == kNoBlock)) return false;
    for (int32_t i = 0; i < whole; ++i) {
      const int32_t last = (i + 1) * config_.block_size - 1;
      const bool seen = config_.sliding_window == 0 || last > num_tokens - config_.sliding_window;
      if ((seen || i == whole - 1) && parent.blocks[at(i)] == kNoBlock) return false;
    }
    child.blocks.assign(parent.blocks.begin(), parent.blocks.begin() + whole);
    for (BlockId block : child.blocks) {
      if (block != kNoBlock) hold(block);
    }
    child.published = std::min(parent.published, whole);
    take_fresh(child, num_tokens, chosen);
    if (partial && barred_.contains(parent.blocks[at(whole)])) barred_.insert(child.blocks.back());
    return true;
  }

  void release(Table& table) {
    Blocks ancestors;
    for (size_t i = 0; i < table.blocks.size() && table.blocks[0] == kNoBlock; ++i) {
      if (table.blocks[i] == kNoBlock) continue;
      if (!contents_.contains(table.blocks[i])) break;
      BlockId block = table.blocks[i];
      while ((block = parent_of(block)) != kNoBlock) ancestors.push_back(block);
      break;
    }
    for (size_t i = table.blocks.size(); i > 0; --i) {
      if (table.blocks[i - 1] != kNoBlock) let_go(table.blocks[i - 1], false);
    }
    for (BlockId block : ancestors) touch(block);
    table = {};
  }

  void reset() {
    if (!config_.enable_prefix_caching) return;
    for (BlockId block : lru_) free_.insert(block);
    lru_.clear();
    contents_.clear();
    for (const auto& [block, count] : ref_counts_) barred_.insert(block);
  }

 private:
  static constexpr int64_t kRoot = 0;
  struct Key {
    int64_t parent;
    CacheSalt salt;
    Tokens tokens;
    bool operator==(const Key&) const = default;
  };
  struct Content {
    Key key;
    int64_t name;
    bool findable;
    bool coming;
    BlockId equal;
    BlockId parent_block;
  };

  static size_t at(int32_t i) { return static_cast<size_t>(i); }
  static ptrdiff_t offset(size_t i) { return static_cast<ptrdiff_t>(i); }
  size_t block_size() const { return at(config_.block_size); }
  bool is_cached(BlockId block) const { return std::ranges::count(lru_, block) != 0; }

  // Whether a sequence with so many computed tokens keeps its block i: some query from its last
  // token on sees it, or the next block needs to know what it comes after.
  bool kept(int32_t i, int32_t computed) const {
    if (config_.sliding_window == 0) return true;
    const int32_t last = (i + 1) * config_.block_size - 1;
    return last > computed - 1 - config_.sliding_window || i >= computed / config_.block_size - 1;
  }

  Key key_of(int64_t parent, const CacheSalt& salt, const Tokens& tokens, size_t i) const {
    const auto first = tokens.begin() + offset(i * block_size());
    return {parent, salt, Tokens(first, first + offset(block_size()))};
  }

  BlockId find(const Key& key) const {
    for (const auto& [block, content] : contents_) {
      if (content.findable && content.key == key) return block;
    }
    return kNoBlock;
  }

  BlockId find_or_coming(const Key& key) const {
    for (const auto& [block, content] : contents_) {
      if ((content.findable || content.coming) && content.key == key) return block;
    }
    return kNoBlock;
  }

  // Whole blocks of `tokens` that are not there and nobody else is about to compute.
  void announce(const Table& table, const Tokens& tokens, const CacheSalt& salt) {
    if (!config_.enable_prefix_caching) return;
    const size_t first = at(table.published);
    const size_t end = std::min(tokens.size() / block_size(), table.blocks.size());
    for (size_t i = first; i < end; ++i) {
      BlockId before = i == 0 ? kNoBlock : table.blocks[i - 1];
      if (i > first && !contents_.contains(before)) before = last_equal_;
      const int64_t parent = i == 0 ? kRoot : contents_.at(before).name;
      const Key key = key_of(parent, salt, tokens, i);
      last_equal_ = find_or_coming(key);
      if (last_equal_ != kNoBlock) continue;
      const BlockId parent_block = i == 0 ? kNoBlock : standing_for(before);
      contents_[table.blocks[i]] = {key,         names_.at(table.blocks[i]), false, true, kNoBlock,
                                    parent_block};
    }
  }

  BlockId standing_for(BlockId block) const {
    const Content& content = contents_.at(block);
    return content.findable || content.coming ? block : content.equal;
  }

  BlockId parent_of(BlockId block) const {
    const Content& content = contents_.at(block);
    const auto parent = contents_.find(content.parent_block);
    const bool valid = parent != contents_.end() && parent->second.findable &&
                       parent->second.name == content.key.parent;
    return valid ? content.parent_block : kNoBlock;
  }

  void touch(BlockId block) {
    if (!is_cached(block)) return;
    std::erase(lru_, block);
    lru_.push_back(block);
  }

  void hold(BlockId block) {
    std::erase(lru_, block);
    ++ref_counts_[block];
  }

  void take_fresh(Table& table, int32_t num_tokens, const Blocks& chosen) {
    const size_t total = at(ceil_div(num_tokens, config_.block_size));
    while (table.blocks.size() < total) {
      ASSERT_LT(table.blocks.size(), chosen.size());
      const BlockId block = chosen[table.blocks.size()];
      if (free_.empty()) {
        ASSERT_EQ(block, lru_.front()) << "not the least recently used block";
        lru_.erase(lru_.begin());
        contents_.erase(block);
        ++num_evictions_;
      } else {
        ASSERT_EQ(free_.erase(block), 1u) << "not a free block";
      }
      ref_counts_[block] = 1;
      names_[block] = ++last_name_;
      table.blocks.push_back(block);
    }
  }

  void let_go(BlockId block, bool out_of_window) {
    if (--ref_counts_.at(block) > 0) return;
    ref_counts_.erase(block);
    barred_.erase(block);
    const auto found = contents_.find(block);
    if (found == contents_.end()) {
      free_.insert(block);
      return;
    }
    Content& content = found->second;
    if (content.coming) {
      contents_.erase(found);
      free_.insert(block);
      return;
    }
    const BlockId findable = find(content.key);
    if (findable == kNoBlock) {
      const BlockId coming = find_or_coming(content.key);
      if (coming != kNoBlock) contents_.erase(coming);
      content.findable = true;
    }
    if (findable == kNoBlock || findable == block) {
      const BlockId parent = out_of_window ? parent_of(block) : kNoBlock;
      lru_.insert(std::ranges::find(lru_, parent), block);
      return;
    }
    contents_.erase(found);
    free_.insert(block);
    if (!out_of_window) touch(findable);
  }

  KvCacheConfig config_;
  std::set<BlockId> free_;
  std::vector<BlockId> lru_;  // least recently used first
  std::map<BlockId, int32_t> ref_counts_;
  std::map<BlockId, Content> contents_;  // of the blocks that have a name
  std::map<BlockId, int64_t> names_;     // that a block gives to contents it is the first to have
  std::set<BlockId> barred_;
  BlockId last_equal_ = kNoBlock;
  int64_t last_name_ = kRoot;
  int64_t num_evictions_ = 0;
};

}  // namespace vllm_lite
