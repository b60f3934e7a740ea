#include "cache/prefix_index.h"

#include <algorithm>
#include <bit>

#include "core/check.h"
#include "core/hash.h"

namespace vllm_lite {
namespace {

// Twice as many buckets as blocks: 8 bytes a block for chains of rarely more than two.
size_t bucket_count(int32_t num_blocks) {
  return std::bit_ceil(2 * static_cast<size_t>(num_blocks));
}

uint64_t low_bits(int32_t bits) { return bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; }

}  // namespace

PrefixIndex::PrefixIndex(int32_t num_blocks, int32_t block_size, int32_t hash_bits)
    : block_size_(static_cast<size_t>(block_size)),
      hash_mask_(low_bits(hash_bits)),
      entries_(static_cast<size_t>(num_blocks)),
      tokens_(static_cast<size_t>(num_blocks) * block_size_),
      buckets_(bucket_count(num_blocks), kNoBlock) {}

PrefixLink PrefixIndex::root(const CacheSalt& salt) const {
  return {kRootContent, hash_salt(salt) & hash_mask_, kNoBlock};
}

PrefixLink PrefixIndex::link(BlockId block) const {
  const Entry& entry = at(block);
  return {entry.content, entry.hash, entry.state == State::kTwin ? entry.equal : block};
}

std::span<const TokenId> PrefixIndex::tokens_of(BlockId block) const {
  return {tokens_.data() + static_cast<size_t>(block) * block_size_, block_size_};
}

BlockId PrefixIndex::find(uint64_t hash, ContentId parent, std::span<const TokenId> tokens,
                          const CacheSalt& salt) const {
  BlockId block = buckets_[bucket_of(hash)];
  for (; block != kNoBlock; block = at(block).next_in_bucket) {
    const Entry& entry = at(block);
    if (entry.hash == hash && entry.parent_content == parent && entry.salt == salt &&
        std::ranges::equal(tokens_of(block), tokens)) {
      break;
    }
  }
  return block;
}

BlockId PrefixIndex::find(const PrefixLink& parent, std::span<const TokenId> tokens,
                          const CacheSalt& salt) const {
  VL_ASSERT(tokens.size() == block_size_);
  return find(hash_tokens(parent.hash, tokens) & hash_mask_, parent.content, tokens, salt);
}

void PrefixIndex::offer(BlockId block, uint64_t generation, const PrefixLink& parent,
                        std::span<const TokenId> tokens, const CacheSalt& salt) {
  VL_ASSERT(tokens.size() == block_size_);
  Entry& entry = at(block);
  if (entry.state != State::kUnknown || parent.content == kNoContent) return;
  entry.hash = hash_tokens(parent.hash, tokens) & hash_mask_;
  entry.parent_content = parent.content;
  entry.parent_block = parent.block;
  entry.salt = salt;
  std::ranges::copy(tokens, tokens_.begin() + static_cast<ptrdiff_t>(block) *
                                                  static_cast<ptrdiff_t>(block_size_));
  entry.equal = find(entry.hash, parent.content, tokens, salt);
  if (entry.equal == kNoBlock) {
    entry.content = generation;
    insert(block);
  } else {
    entry.content = at(entry.equal).content;
    entry.state = State::kTwin;
  }
}

BlockId PrefixIndex::settle(BlockId block) {
  Entry& entry = at(block);
  if (entry.state == State::kFindable) return block;
  if (entry.state != State::kTwin) return kNoBlock;
  const BlockId equal = find(entry.hash, entry.parent_content, tokens_of(block), entry.salt);
  if (equal != kNoBlock) return equal;
  entry.equal = kNoBlock;
  insert(block);
  return block;
}

void PrefixIndex::forget(BlockId block) {
  if (findable(block)) remove(block);
  at(block) = Entry{};
}

void PrefixIndex::bar(BlockId block) {
  forget(block);
  at(block).state = State::kBarred;
}

BlockId PrefixIndex::parent_of(BlockId block) const {
  const Entry& entry = at(block);
  const BlockId parent = entry.parent_block;
  if (parent == kNoBlock || !findable(parent)) return kNoBlock;
  return at(parent).content == entry.parent_content ? parent : kNoBlock;
}

void PrefixIndex::insert(BlockId block) {
  Entry& entry = at(block);
  BlockId& first = buckets_[bucket_of(entry.hash)];
  entry.state = State::kFindable;
  entry.next_in_bucket = first;
  first = block;
}

void PrefixIndex::remove(BlockId block) {
  BlockId* place = &buckets_[bucket_of(at(block).hash)];
  while (*place != block) {
    VL_ASSERT(*place != kNoBlock);
    place = &at(*place).next_in_bucket;
  }
  *place = at(block).next_in_bucket;
}

void PrefixIndex::check_invariants() const {
  size_t num_findable = 0;
  const BlockId num_blocks = static_cast<BlockId>(entries_.size());
  for (BlockId block = 0; block < num_blocks; ++block) {
    const Entry& entry = at(block);
    const bool has_name = entry.state == State::kTwin || entry.state == State::kFindable;
    VL_ASSERT(has_name == (entry.content != kNoContent));
    VL_ASSERT(has_name == (entry.parent_content != kNoContent));
    VL_ASSERT(entry.content != kRootContent &&
              (!has_name || entry.content != entry.parent_content));
    if (entry.state != State::kFindable) continue;
    ++num_findable;
    // Finding itself says both that it is in its bucket and that no other block is equal to it.
    VL_ASSERT(find(entry.hash, entry.parent_content, tokens_of(block), entry.salt) == block);
  }
  size_t num_in_buckets = 0;
  for (BlockId first : buckets_) {
    for (BlockId block = first; block != kNoBlock; block = at(block).next_in_bucket) {
      VL_ASSERT(findable(block));
      VL_ASSERT(++num_in_buckets <= num_findable);
    }
  }
  VL_ASSERT(num_in_buckets == num_findable);
}

}  // namespace vllm_lite
