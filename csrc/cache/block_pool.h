// Which blocks of the arena are taken, and which go next.
//
// Invariant "one state": every block is in exactly one of
//   free    - no references, in the free list,
//   cached  - no references, contents worth keeping, in the LRU list,
//   in use  - one reference or more, in no list.
// Which contents are worth keeping is the caller's business. Every call is O(1) and allocates
// nothing. A wrong state is an InternalError.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/intrusive_list.h"
#include "core/types.h"

namespace vllm_lite {

constexpr BlockId kNoBlock = -1;

enum class BlockState : uint8_t { kFree, kCached, kInUse };

class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return static_cast<int32_t>(blocks_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_cached() const { return static_cast<int32_t>(cached_.size()); }
  int32_t num_available() const { return num_free() + num_cached(); }

  BlockState state(BlockId block) const { return at(block).state; }
  int32_t ref_count(BlockId block) const { return at(block).ref_count; }
  // Names the block's present contents: changes whenever they become worthless, and is never 0 nor
  // the same for two contents, of whichever block. 64 bits do not run out.
  uint64_t generation(BlockId block) const { return at(block).generation; }

  // Free to in use, with one reference. The block freed last comes first: its memory is the
  // warmest. REQUIRES: num_free() > 0.
  BlockId allocate();

  // One more reference. REQUIRES: cached or in use.
  void ref(BlockId block);

  // One reference less. After the last one the block is cached if `keep`, else free. A kept block
  // is the most recently used, or, if `before` is given and cached, just a little older than that
  // one. REQUIRES: in use.
  void unref(BlockId block, bool keep, BlockId before = kNoBlock);

  // Makes a cached block the most recently used one; leaves a block in use alone.
  // REQUIRES: not free.
  void touch(BlockId block);

  // Frees the least recently used cached block and returns it. REQUIRES: num_cached() > 0.
  BlockId evict();

  // Throws InternalError unless "one state" holds and block b has ref_counts[b] references.
  // O(blocks).
  void check_invariants(std::span<const int32_t> ref_counts) const;

 private:
  struct Block {
    ListHook hook;  // free or LRU list
    uint64_t generation = 0;
    int32_t ref_count = 0;
    BlockState state = BlockState::kFree;
  };

  const Block& at(BlockId block) const { return blocks_[static_cast<size_t>(block)]; }
  Block& at(BlockId block) { return blocks_[static_cast<size_t>(block)]; }
  BlockId id_of(const Block* block) const { return static_cast<BlockId>(block - blocks_.data()); }
  void put_into_free(Block& block);

  std::vector<Block> blocks_;
  IntrusiveList<Block, &Block::hook> free_;
  IntrusiveList<Block, &Block::hook> cached_;  // front: least recently used
  uint64_t last_generation_ = 0;
};

}  // namespace vllm_lite
