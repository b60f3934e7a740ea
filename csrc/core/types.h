// Names for the integers that travel through the engine.
#pragma once

#include <array>
#include <cstdint>

namespace vllm_lite {

using TokenId = int32_t;
using BlockId = int32_t;  // index of a KV block in the arena
using RowId = int32_t;    // place of a running sequence in the worker's per-row state

// A request's key: the client that sent it in the high 16 bits, that client's own counter below.
// The engine core never sees the request's textual id.
using RequestKey = uint64_t;

constexpr int kClientShift = 48;
constexpr uint16_t client_of(RequestKey key) { return static_cast<uint16_t>(key >> kClientShift); }

// Digest of everything besides the tokens that KV contents depend on (cache salt, adapter, media).
// The client computes it with a cryptographic hash over typed, length-prefixed parts; all zero when
// there are none. Compared whole on every prefix hit.
using CacheSalt = std::array<uint64_t, 2>;

constexpr int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

}  // namespace vllm_lite
