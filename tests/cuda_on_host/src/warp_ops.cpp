#include "cuda_on_host/warp_ops.h"

#include <algorithm>
#include <bit>
#include <string>

#include "cuda_on_host/block.h"

namespace cuda_on_host {
namespace {

template <typename F>
void for_each_lane(uint32_t lanes, F&& body) {
  for (; lanes != 0; lanes &= lanes - 1) body(std::countr_zero(lanes));
}

template <typename Operands>
Operands& operands_of(Warp& warp, int lane) {
  return *static_cast<Operands*>(warp.threads[lane]->operands);
}

// ---- shuffles

struct ShuffleOperands {
  uint64_t bits;
  uint32_t source;
};

void complete_shuffle(Warp& warp, uint32_t lanes) {
  uint64_t bits[kWarpSize];
  for_each_lane(lanes,
                [&](int lane) { bits[lane] = operands_of<ShuffleOperands>(warp, lane).bits; });
  for_each_lane(lanes, [&](int lane) {
    auto& operands = operands_of<ShuffleOperands>(warp, lane);
    if ((lanes >> operands.source & 1) == 0) {
      fail("a shuffle reads from lane " + std::to_string(operands.source) +
               ", which takes no part in it",
           *warp.threads[lane]);
    }
    operands.bits = bits[operands.source];
  });
}

constexpr Collective kShuffles[] = {{"__shfl_sync()", complete_shuffle},
                                    {"__shfl_up_sync()", complete_shuffle},
                                    {"__shfl_down_sync()", complete_shuffle},
                                    {"__shfl_xor_sync()", complete_shuffle}};

// As the PTX ISA defines shfl: outside its segment a lane gets its own value.
uint32_t source_lane(Shuffle kind, uint32_t lane, uint32_t argument, uint32_t width) {
  const uint32_t first = lane & ~(width - 1), last = first + width - 1;
  argument &= kWarpSize - 1;
  switch (kind) {
    case Shuffle::kIndex:
      return first + (argument & (width - 1));
    case Shuffle::kUp:
      return lane < first + argument ? lane : lane - argument;
    case Shuffle::kDown:
      return lane + argument > last ? lane : lane + argument;
    case Shuffle::kXor:
      return (lane ^ argument) > last ? lane : lane ^ argument;
  }
  __builtin_unreachable();
}

// ---- votes and match

struct VoteOperands {
  uint64_t value;
  uint32_t result;
};

void complete_ballot(Warp& warp, uint32_t lanes) {
  uint32_t votes = 0;
  for_each_lane(lanes, [&](int lane) {
    votes |= static_cast<uint32_t>(operands_of<VoteOperands>(warp, lane).value) << lane;
  });
  for_each_lane(lanes, [&](int lane) { operands_of<VoteOperands>(warp, lane).result = votes; });
}

void complete_match(Warp& warp, uint32_t lanes) {
  for_each_lane(lanes, [&](int lane) {
    auto& operands = operands_of<VoteOperands>(warp, lane);
    operands.result = 0;
    for_each_lane(lanes, [&](int other) {
      const bool same = operands_of<VoteOperands>(warp, other).value == operands.value;
      operands.result |= static_cast<uint32_t>(same) << other;
    });
  });
}

void complete_all(Warp& warp, uint32_t lanes) {
  complete_ballot(warp, lanes);
  for_each_lane(lanes, [&](int lane) {
    auto& operands = operands_of<VoteOperands>(warp, lane);
    operands.result = operands.result == lanes;
  });
}

constexpr Collective kBallot{"__ballot_sync()", complete_ballot};
constexpr Collective kAny{"__any_sync()", complete_ballot};
constexpr Collective kAll{"__all_sync()", complete_all};
constexpr Collective kMatchAny{"__match_any_sync()", complete_match};

uint32_t vote(const Collective& collective, uint32_t mask, uint64_t value) {
  VoteOperands operands{value, 0};
  meet(collective, mask, &operands);
  return operands.result;
}

// ---- reductions

template <typename T>
T combine(Reduce kind, T a, T b) {
  switch (kind) {
    case Reduce::kAdd:  // wraps around
      return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
    case Reduce::kMin:
      return std::min(a, b);
    case Reduce::kMax:
      return std::max(a, b);
    case Reduce::kAnd:
      return a & b;
    case Reduce::kOr:
      return a | b;
    case Reduce::kXor:
      return a ^ b;
  }
  __builtin_unreachable();
}

template <typename T, Reduce kKind>
void complete_reduce(Warp& warp, uint32_t lanes) {
  T total = *static_cast<T*>(warp.threads[std::countr_zero(lanes)]->operands);
  for_each_lane(lanes & (lanes - 1),
                [&](int lane) { total = combine(kKind, total, operands_of<T>(warp, lane)); });
  for_each_lane(lanes, [&](int lane) { operands_of<T>(warp, lane) = total; });
}

template <typename T>
constexpr Collective kReductions[] = {{"__reduce_add_sync()", complete_reduce<T, Reduce::kAdd>},
                                      {"__reduce_min_sync()", complete_reduce<T, Reduce::kMin>},
                                      {"__reduce_max_sync()", complete_reduce<T, Reduce::kMax>},
                                      {"__reduce_and_sync()", complete_reduce<T, Reduce::kAnd>},
                                      {"__reduce_or_sync()", complete_reduce<T, Reduce::kOr>},
                                      {"__reduce_xor_sync()", complete_reduce<T, Reduce::kXor>}};

constexpr Collective kSyncWarp{"__syncwarp()", [](Warp&, uint32_t) {}, Collective::Order::kAll};

}  // namespace

void sync_warp(uint32_t mask) { meet(kSyncWarp, mask, nullptr); }

uint64_t shuffle_bits(Shuffle kind, uint32_t mask, uint64_t bits, uint32_t argument, int width) {
  if (width <= 0 || width > kWarpSize || (width & (width - 1)) != 0) {
    fail("a shuffle of width " + std::to_string(width) + ": must be a power of two up to 32");
  }
  ShuffleOperands operands{
      bits, source_lane(kind, current.thread->lane, argument, static_cast<uint32_t>(width))};
  meet(kShuffles[static_cast<int>(kind)], mask, &operands);
  return operands.bits;
}

uint32_t ballot(uint32_t mask, bool predicate) { return vote(kBallot, mask, predicate); }
bool any(uint32_t mask, bool predicate) { return vote(kAny, mask, predicate) != 0; }
bool all(uint32_t mask, bool predicate) { return vote(kAll, mask, predicate) != 0; }
uint32_t match_any(uint32_t mask, uint64_t bits) { return vote(kMatchAny, mask, bits); }

int32_t reduce_signed(Reduce kind, uint32_t mask, int32_t value) {
  meet(kReductions<int32_t>[static_cast<int>(kind)], mask, &value);
  return value;
}

uint32_t reduce_unsigned(Reduce kind, uint32_t mask, uint32_t value) {
  meet(kReductions<uint32_t>[static_cast<int>(kind)], mask, &value);
  return value;
}

}  // namespace cuda_on_host
