// Shorthand for the KV cache tests.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "cache/prefix_index.h"

namespace vllm_lite {

// Reaches the constructor that narrows the hash, and the prefix index.
class KvCacheManagerPeer {
 public:
  // The blocks that admit() would find for these tokens; `coming`: and those to wait for after
  // them.
  static std::vector<BlockId> find_prefix(const KvCacheManager& cache,
                                          std::span<const TokenId> tokens, const CacheSalt& salt,
                                          bool coming = false) {
    std::vector<BlockId> blocks;
    if (cache.index_ == nullptr) return blocks;
    const auto size = static_cast<size_t>(cache.block_size());
    PrefixLink place = cache.index_->root(salt);
    for (size_t end = size; end <= tokens.size() - !coming; end += size) {
      const BlockId block = cache.index_->find(place, tokens.subspan(end - size, size), salt);
      if (block == kNoBlock || (!coming && !cache.index_->findable(block))) break;
      blocks.push_back(block);
      place = cache.index_->link(block);
    }
    return blocks;
  }
  static std::unique_ptr<KvCacheManager> create(const KvCacheConfig& config, int32_t hash_bits) {
    return std::unique_ptr<KvCacheManager>(new KvCacheManager(config, hash_bits));
  }
};

using Tokens = std::vector<TokenId>;
using Blocks = std::vector<BlockId>;
constexpr CacheSalt kSalt{};

// first, first + 1, ...
inline Tokens sequence_tokens(int32_t count, TokenId first = 0) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline int32_t length(const Tokens& tokens) { return static_cast<int32_t>(tokens.size()); }

// Admits with room for exactly its tokens.
inline int32_t admit(KvCacheManager& cache, BlockTable& table, const Tokens& tokens,
                     const CacheSalt& salt = kSalt) {
  return cache.admit(table, tokens, salt, length(tokens));
}

// Admits, computes everything, and gives it back: `tokens` are cached afterwards. Returns what
// admit returned.
inline int32_t run_once(KvCacheManager& cache, const Tokens& tokens,
                        const CacheSalt& salt = kSalt) {
  BlockTable table;
  const int32_t cached = admit(cache, table, tokens, salt);
  if (cached < 0) return cached;
  cache.mark_computed(table, tokens, salt, length(tokens));
  cache.release(table);
  return cached;
}

inline void check(const KvCacheManager& cache, std::vector<const BlockTable*> tables = {}) {
  EXPECT_NO_THROW(cache.check_invariants(tables));
}

}  // namespace vllm_lite
