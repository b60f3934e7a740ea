// The KV blocks of every sequence: which blocks it holds, what it may share, when they come back.
//
// Sits on a BlockPool (reference counts, LRU of unreferenced cached blocks) and a PrefixIndex
// (hash chain of full blocks, each hit confirmed against the block's tokens, parent and salt).
//
// Invariant "one state": every block is in exactly one of
//   free    - no references, contents worthless,
//   cached  - no references, contents findable through the prefix index, evictable in LRU order,
//   in use  - reference count = number of block tables that hold it.
// Cost: every call is O(blocks it touches); nothing allocates heap memory once a block table has
// reached its capacity (see BlockTable::reserve).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/block_pool.h"
#include "core/types.h"

namespace vllm_lite {

class PrefixIndex;

struct KvCacheConfig {
  int32_t num_blocks = 0;   // in the arena
  int32_t block_size = 16;  // tokens in a block
  bool enable_prefix_caching = true;
  // Tokens that a query sees, itself included; 0: all. Set only when every layer has this window:
  // then blocks that fall out of it are given back and their table entries become kNoBlock.
  int32_t sliding_window = 0;
};

// The blocks of one sequence, in token order. Owned by the sequence, changed by the manager alone.
struct BlockTable {
  std::vector<BlockId> blocks;    // entry i holds tokens [i*block_size, (i+1)*block_size)
  int32_t num_published = 0;      // leading blocks already offered to the prefix index
  int32_t num_out_of_window = 0;  // leading entries that are kNoBlock
  // Leading blocks that this sequence found in the prefix index at its last admission.
  int32_t num_hit_blocks = 0;
  // What admit() last told to wait for: a block of another table, and its contents at that time.
  BlockId awaited_block = kNoBlock;
  uint64_t awaited_generation = 0;

  void reserve(int32_t num_blocks) { blocks.reserve(static_cast<size_t>(num_blocks)); }
};

struct BlockCopy {
  BlockId source;
  BlockId destination;
};

struct KvCacheStats {
  int64_t prefix_queries = 0;  // tokens looked up in the prefix index at admission
  int64_t prefix_hits = 0;     // of those, tokens found
  int64_t evictions = 0;       // cached blocks reused for something else
};

class KvCacheManager {
 public:
  // Throws Error if the configuration cannot work (no blocks, block size not a power of two ≥ 1).
  explicit KvCacheManager(const KvCacheConfig& config);
  ~KvCacheManager();

  int32_t num_blocks() const;
  int32_t block_size() const;
  // Blocks that an allocation could take now: free and cached ones.
  int32_t num_available_blocks() const;
  int32_t num_used_blocks() const;
  int32_t blocks_for(int32_t num_tokens) const;

  // Gives an empty table the longest cached prefix of `tokens` in whole blocks (never all tokens:
  // at least one is left to compute) and fresh blocks for the rest up to `num_tokens` in all, and
  // announces to the prefix index which whole blocks of `tokens` will be computed in them. All or
  // nothing. Returns the number of cached tokens, or kNoRoom if there is not room for everything;
  // then nothing changed. `headroom`: blocks that must still be available afterwards.
  //
  // Returns kAwaits, and changes nothing but what awaits() says, if other tables are about to
  // compute at least `min_awaited_tokens` of those that come after the cached prefix (0: never).
  //
  // A hit has at most `max_hit_tokens`: what comes after is computed, cached or not.
  //
  // Looks the prefix up anew at every call. REQUIRES: table.blocks is empty.
  int32_t admit(BlockTable& table, std::span<const TokenId> tokens, const CacheSalt& salt,
                int32_t num_tokens, int32_t headroom = 0, int32_t min_awaited_tokens = 0,
                int32_t max_hit_tokens = std::numeric_limits<int32_t>::max());
  static constexpr int32_t kNoRoom = -1;
  static constexpr int32_t kAwaits = -2;

  // True from a kAwaits until the last block of what it is about was computed or given up: so long
  // admit() need not be tried. O(1), without hashing.
  bool awaits(const BlockTable& table) const;

  // Makes room in the table for `num_tokens` tokens in all. False, and nothing changed, if the pool
  // cannot. O(new blocks).
  bool grow(BlockTable& table, int32_t num_tokens);

  // Gives back the blocks behind those of the first `num_tokens` tokens. O(blocks given back).
  // REQUIRES: none of them is published or shared.
  void shrink(BlockTable& table, int32_t num_tokens);

  // The first `num_computed` of `tokens` now have their KV in the table's blocks: publishes blocks
  // that became full to the prefix index (keeping the existing block when an equal one is already
  // there) and gives back blocks that fell out of the sliding window.
  void mark_computed(BlockTable& table, std::span<const TokenId> tokens, const CacheSalt& salt,
                     int32_t num_computed);

  // Gives an empty table the parent's first `num_tokens` tokens: whole blocks shared, a partial
  // last block copied (appended to `copies`, to be carried out before the next forward step).
  // False, and nothing changed, if no block is available for the copy, or if the parent has given
  // back blocks that token `num_tokens` of the child would still see in the sliding window (waiting
  // does not help then: admit the child). REQUIRES: parent holds num_tokens tokens.
  bool fork(const BlockTable& parent, BlockTable& child, int32_t num_tokens,
            std::vector<BlockCopy>& copies);

  // Gives all blocks back, last block first, so that eviction eats a prefix from its tail.
  // The table is empty afterwards and may be admitted again.
  void release(BlockTable& table);

  // Forgets every cached block that nobody holds (weights or adapters changed). Blocks in use stay
  // with their sequences, but neither they nor what those sequences compute after them is found
  // again.
  void reset_prefix_cache();

  const KvCacheStats& stats() const;

  // Throws InternalError unless every invariant above holds for these tables, which must be all
  // the tables in being. O(blocks).
  void check_invariants(std::span<const BlockTable* const> tables) const;

 private:
  friend class KvCacheManagerPeer;  // tests: narrows the hash, looks prefixes up
  KvCacheManager(const KvCacheConfig& config, int32_t hash_bits);

  void make_room(BlockTable& table, int32_t num_blocks) const;
  // REQUIRES: num_available_blocks() > 0.
  BlockId take_block();
  void give_back(BlockId block, bool out_of_window);
  void announce(const BlockTable& table, std::span<const TokenId> tokens, const CacheSalt& salt);
  int32_t num_out_of_window(int32_t num_computed) const;
  void check_table(const BlockTable& table) const;

  KvCacheConfig config_;
  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<PrefixIndex> index_;  // null without prefix caching
  KvCacheStats stats_;
};

}  // namespace vllm_lite
