#include "cache/block_pool.h"

#include "core/check.h"

namespace vllm_lite {

BlockPool::BlockPool(int32_t num_blocks) : blocks_(static_cast<size_t>(num_blocks)) {
  for (BlockId block = num_blocks - 1; block >= 0; --block) put_into_free(at(block));
}

void BlockPool::put_into_free(Block& block) {
  block.state = BlockState::kFree;
  block.generation = ++last_generation_;
  free_.push_front(&block);
}

BlockId BlockPool::allocate() {
  Block* block = free_.front();
  VL_ASSERT(block != nullptr);
  free_.erase(block);
  block->state = BlockState::kInUse;
  block->ref_count = 1;
  return id_of(block);
}

void BlockPool::ref(BlockId id) {
  Block& block = at(id);
  VL_ASSERT(block.state != BlockState::kFree);
  if (block.state == BlockState::kCached) {
    cached_.erase(&block);
    block.state = BlockState::kInUse;
  }
  ++block.ref_count;
}

void BlockPool::unref(BlockId id, bool keep, BlockId before) {
  Block& block = at(id);
  VL_ASSERT(block.state == BlockState::kInUse);
  if (--block.ref_count > 0) return;
  if (!keep) {
    put_into_free(block);
    return;
  }
  block.state = BlockState::kCached;
  const bool has_place = before != kNoBlock && at(before).state == BlockState::kCached;
  cached_.insert_before(has_place ? &at(before) : nullptr, &block);
}

void BlockPool::touch(BlockId id) {
  Block& block = at(id);
  VL_ASSERT(block.state != BlockState::kFree);
  if (block.state != BlockState::kCached) return;
  cached_.erase(&block);
  cached_.push_back(&block);
}

BlockId BlockPool::evict() {
  Block* block = cached_.front();
  VL_ASSERT(block != nullptr);
  cached_.erase(block);
  put_into_free(*block);
  return id_of(block);
}

void BlockPool::check_invariants(std::span<const int32_t> ref_counts) const {
  VL_ASSERT(ref_counts.size() == blocks_.size());
  size_t num_in_use = 0;
  for (BlockId id = 0; id < num_blocks(); ++id) {
    const Block& block = at(id);
    VL_ASSERT(block.ref_count == ref_counts[static_cast<size_t>(id)]);
    VL_ASSERT((block.ref_count > 0) == (block.state == BlockState::kInUse));
    VL_ASSERT(block.hook.linked() == (block.state != BlockState::kInUse));
    VL_ASSERT(block.generation > 0 && block.generation <= last_generation_);
    num_in_use += block.state == BlockState::kInUse;
  }
  // Each list holds only blocks of its state; with the sums below, all of them.
  const auto check_list = [&](const auto& list, BlockState state) {
    size_t length = 0;
    for (const Block* block = list.front(); block != nullptr; block = list.next(block)) {
      VL_ASSERT(block->state == state);
      VL_ASSERT(++length <= list.size());
    }
    VL_ASSERT(length == list.size());
  };
  check_list(free_, BlockState::kFree);
  check_list(cached_, BlockState::kCached);
  VL_ASSERT(free_.size() + cached_.size() + num_in_use == blocks_.size());
}

}  // namespace vllm_lite
