// Finds the block that holds given tokens after a given prefix.
//
// Contents have names. The ContentId of a full block stands for everything its KV depends on: its
// tokens, all tokens before them and the salt. It is the generation of the block that had these
// contents first, so it is never used again for something else. An entry stores its parent's
// ContentId; a hit is confirmed by comparing parent, tokens and salt, never by hash alone. Hence
//   - no hash, however narrow, can make one prompt find another's block;
//   - when a parent is evicted before its child, nothing that later gets the parent's block can
//     lead to the child.
//
// Each block is in one state here:
//   unknown  - not offered, or offered after a block that has no name: has no name itself;
//   coming   - announced: whoever holds it is about to compute these contents. Has its name already
//              and is in the hash table, so that others can wait for it instead of computing the
//              same, but nobody may use it;
//   twin     - has the name of an equal block that was findable when it was offered. Its children
//              hang below that name, and it can take the other's place later (settle);
//   findable - in the hash table. At most one block, coming or findable, per (parent, tokens,
//   salt); barred   - contents are out of date (reset while in use): never to be found.
// All memory is taken in the constructor; calls cost O(block_size), expected.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/block_pool.h"
#include "core/types.h"

namespace vllm_lite {

using ContentId = uint64_t;
constexpr ContentId kNoContent = 0;
constexpr ContentId kRootContent = ~ContentId{0};  // what a first block comes after

// The place in a chain that a next block comes after.
struct PrefixLink {
  ContentId content = kNoContent;
  uint64_t hash = 0;
  BlockId block = kNoBlock;  // the block that was findable under `content`; a hint for parent_of
};

class PrefixIndex {
 public:
  // `hash_bits` below 64 narrows the hash, to test that collisions do no harm.
  PrefixIndex(int32_t num_blocks, int32_t block_size, int32_t hash_bits = 64);

  PrefixLink root(const CacheSalt& salt) const;
  // The place after this block; `content` is kNoContent if the block has no name.
  PrefixLink link(BlockId block) const;

  // The block with these tokens in this place, findable or coming, or kNoBlock. REQUIRES:
  // tokens.size() == block_size.
  BlockId find(const PrefixLink& parent, std::span<const TokenId> tokens,
               const CacheSalt& salt) const;

  // The block, of this generation, will hold these tokens in this place: makes it coming unless an
  // equal block is in the hash table. Returns the place after these contents; no effect and no
  // place if the block is barred or the parent has no name. REQUIRES: tokens.size() == block_size;
  // the block is unknown or barred; the generation names the contents.
  PrefixLink announce(BlockId block, uint64_t generation, const PrefixLink& parent,
                      std::span<const TokenId> tokens, const CacheSalt& salt);

  // The block, of this generation, now holds these tokens in this place: makes it findable, or a
  // twin if an equal block is; takes the name and the place of an equal block that is only coming.
  // No effect on a twin, findable or barred block, nor if the parent has no name. REQUIRES:
  // tokens.size() == block_size; the generation names the contents; if the block is coming, it was
  // announced with these tokens and this salt.
  void offer(BlockId block, uint64_t generation, const PrefixLink& parent,
             std::span<const TokenId> tokens, const CacheSalt& salt);

  // Nobody holds the block any more: returns the findable block with its contents, which is the
  // block itself, or an equal one, or kNoBlock. A twin whose equal is gone becomes findable, also
  // in place of one that is only coming.
  BlockId settle(BlockId block);

  // The block's contents are gone. Any state.
  void forget(BlockId block);
  // The block's contents must not be found until forget().
  void bar(BlockId block);
  bool barred(BlockId block) const { return at(block).state == State::kBarred; }

  bool coming(BlockId block) const { return at(block).state == State::kComing; }
  bool findable(BlockId block) const { return at(block).state == State::kFindable; }
  // The findable block that this one comes after; kNoBlock if there is none or it is not known.
  BlockId parent_of(BlockId block) const;
  // The content that this block comes after; kNoContent for a block without a name.
  ContentId parent_content(BlockId block) const { return at(block).parent_content; }

  // Throws InternalError unless the invariants above hold. O(blocks).
  void check_invariants() const;

 private:
  enum class State : uint8_t { kUnknown, kComing, kTwin, kFindable, kBarred };

  struct Entry {
    ContentId content = kNoContent;
    ContentId parent_content = kNoContent;
    uint64_t hash = 0;  // of the chain up to and with this block
    CacheSalt salt{};
    BlockId parent_block = kNoBlock;
    BlockId equal = kNoBlock;           // findable block that a twin is equal to, when offered
    BlockId next_in_bucket = kNoBlock;  // coming and findable blocks
    State state = State::kUnknown;
  };

  const Entry& at(BlockId block) const { return entries_[static_cast<size_t>(block)]; }
  Entry& at(BlockId block) { return entries_[static_cast<size_t>(block)]; }
  std::span<const TokenId> tokens_of(BlockId block) const;
  size_t bucket_of(uint64_t hash) const {
    return static_cast<size_t>(hash) & (buckets_.size() - 1);
  }
  BlockId find(uint64_t hash, ContentId parent, std::span<const TokenId> tokens,
               const CacheSalt& salt) const;
  bool in_table(BlockId block) const { return findable(block) || coming(block); }
  void describe(BlockId block, uint64_t hash, const PrefixLink& parent,
                std::span<const TokenId> tokens, const CacheSalt& salt);
  void insert(BlockId block, State state);
  void remove(BlockId block);

  size_t block_size_;
  uint64_t hash_mask_;
  std::vector<Entry> entries_;    // [num_blocks]
  std::vector<TokenId> tokens_;   // [num_blocks, block_size]
  std::vector<BlockId> buckets_;  // first block; a power of two of them
};

}  // namespace vllm_lite
