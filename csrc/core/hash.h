// A 64-bit hash for chains of token blocks: hash_tokens(hash_tokens(start, block 0), block 1)...
//
// Portable: the value depends on the tokens alone, not on byte order, word size or process, so that
// two processes can compare chains. Not secret: whoever knows it can make collisions, so a user
// must confirm a match by comparing what was hashed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/types.h"

namespace vllm_lite {

// Bijective; every input bit changes each output bit with a chance near 1/2 (SplitMix64's last
// step).
constexpr uint64_t hash_finish(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

// Adds one word to a running state. Bijective in the state for a fixed word, and the other way
// round.
constexpr uint64_t hash_step(uint64_t state, uint64_t word) {
  word = std::rotl(word * 0x9e3779b97f4a7c15ULL, 29) * 0xd6e8feb86659fd93ULL;
  return std::rotl(state ^ word, 27) * 0xa0761d6478bd642fULL + 0xe7037ed1a0b428dbULL;
}

// The hash of `tokens` after what `parent` is the hash of. The number of tokens counts too. The
// parent comes in last, so that a processor works on the next blocks of a chain at the same time.
constexpr uint64_t hash_tokens(uint64_t parent, std::span<const TokenId> tokens) {
  uint64_t state = hash_step(0, tokens.size());
  size_t i = 0;
  for (; i + 2 <= tokens.size(); i += 2) {
    state = hash_step(state, static_cast<uint64_t>(static_cast<uint32_t>(tokens[i])) |
                                 static_cast<uint64_t>(static_cast<uint32_t>(tokens[i + 1])) << 32);
  }
  if (i < tokens.size()) state = hash_step(state, static_cast<uint32_t>(tokens[i]));
  return hash_finish(hash_step(parent, state));
}

// Where the chains with this salt start.
constexpr uint64_t hash_salt(const CacheSalt& salt) {
  return hash_finish(hash_step(hash_step(0, salt[0]), salt[1]));
}

}  // namespace vllm_lite
