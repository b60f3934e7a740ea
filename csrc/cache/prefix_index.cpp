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

PrefixLink PrefixIndex::announce(BlockId block, uint64_t generation, const PrefixLink& parent,
                                 std::span<const TokenId> tokens, const CacheSalt& salt) {
  VL_ASSERT(tokens.size() == block_size_);
  if (barred(block) || parent.content == kNoContent) return {};
  VL_ASSERT(at(block).state == State::kUnknown);
  const uint64_t hash = hash_tokens(parent.hash, tokens) & hash_mask_;
  const BlockId equal = find(hash, parent.content, tokens, salt);
  if (equal != kNoBlock) return link(equal);
  describe(block, hash, parent, tokens, salt);
  at(block).content = generation;
  insert(block, State::kComing);
  return link(block);
}

void PrefixIndex::offer(BlockId block, uint64_t generation, const PrefixLink& parent,
                        std::span<const TokenId> tokens, const CacheSalt& salt) {
  VL_ASSERT(tokens.size() == block_size_);
  Entry& entry = at(block);
  if (entry.state == State::kComing) {
    if (entry.parent_content == parent.content) {
      entry.parent_block = parent.block;
      entry.state = State::kFindable;
      return;
    }
    forget(block);  // announced after an equal of its parent, which has another name
  }
  if (entry.state != State::kUnknown || parent.content == kNoContent) return;
  const uint64_t hash = hash_tokens(parent.hash, tokens) & hash_mask_;
  const BlockId equal = find(hash, parent.content, tokens, salt);
  describe(block, hash, parent, tokens, salt);
  entry.content = equal == kNoBlock ? generation : at(equal).content;
  if (equal != kNoBlock && findable(equal)) {
    entry.equal = equal;
    entry.state = State::kTwin;
    return;
  }
  if (equal != kNoBlock) forget(equal);
  insert(block, State::kFindable);
}

BlockId PrefixIndex::settle(BlockId block) {
  Entry& entry = at(block);
  if (entry.state == State::kFindable) return block;
  if (entry.state != State::kTwin) return kNoBlock;
  const BlockId equal = find(entry.hash, entry.parent_content, tokens_of(block), entry.salt);
  if (equal != kNoBlock && findable(equal)) return equal;
  if (equal != kNoBlock) forget(equal);
  entry.equal = kNoBlock;
  insert(block, State::kFindable);
  return block;
}

void PrefixIndex::forget(BlockId block) {
  if (in_table(block)) remove(block);
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

void PrefixIndex::describe(BlockId block, uint64_t hash, const PrefixLink& parent,
                           std::span<const TokenId> tokens, const CacheSalt& salt) {
  Entry& entry = at(block);
  entry.hash = hash;
  entry.parent_content = parent.content;
  entry.parent_block = parent.block;
  entry.salt = salt;
  std::ranges::copy(tokens, tokens_.begin() + static_cast<ptrdiff_t>(block) *
                                                  static_cast<ptrdiff_t>(block_size_));
}

void PrefixIndex::insert(BlockId block, State state) {
  Entry& entry = at(block);
  BlockId& first = buckets_[bucket_of(entry.hash)];
  entry.state = state;
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
  size_t num_in_table = 0;
  const BlockId num_blocks = static_cast<BlockId>(entries_.size());
  for (BlockId block = 0; block < num_blocks; ++block) {
    const Entry& entry = at(block);
    const bool has_name = entry.state == State::kTwin || in_table(block);
    VL_ASSERT(has_name == (entry.content != kNoContent));
    VL_ASSERT(has_name == (entry.parent_content != kNoContent));
    VL_ASSERT(entry.content != kRootContent &&
              (!has_name || entry.content != entry.parent_content));
    if (!in_table(block)) continue;
    ++num_in_table;
    // Finding itself says both that it is in its bucket and that no other block is equal to it.
    VL_ASSERT(find(entry.hash, entry.parent_content, tokens_of(block), entry.salt) == block);
  }
  size_t num_in_buckets = 0;
  for (BlockId first : buckets_) {
    for (BlockId block = first; block != kNoBlock; block = at(block).next_in_bucket) {
      VL_ASSERT(in_table(block));
      VL_ASSERT(++num_in_buckets <= num_in_table);
    }
  }
  VL_ASSERT(num_in_buckets == num_in_table);
}

}  // namespace vllm_lite
