// wgmma: the matrix product of four warps that runs beside them. It happens as late as the program
// allows, and the sums are NaN until then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "cuda_on_host/tensor_core.h"

namespace cuda_on_host {

inline constexpr int kWarpsPerGroup = 4;

// b is a matrix descriptor of the PTX ISA: rows of 64 elements in shared memory, 128-byte swizzle.
struct WgmmaShape {
  Float16Kind type;
  bool b_in_rows;  // "MN-major": the stored rows are rows of b; else its columns
  int blocks;      // of 8 columns: 8 or 16
};

// d [64 x 8 blocks] = a [64 x 16] b [16 x 8 blocks], plus d if `accumulate`. Sums as mma_16x8x16's.
// `a` and `d`, here arrays of the caller, must live until the product is waited for.
void wgmma(WgmmaShape shape, float* d, const uint32_t* a, uint64_t b, bool accumulate);
void wgmma_fence();
void wgmma_commit();
// Until at most `pending` of the warp's latest groups are unfinished.
void wgmma_wait(uint32_t pending);

// ---- what a block keeps of them

// A thread's registers that wgmma has used: sums, or its part of a.
struct WgmmaRegisters {
  static constexpr int kMost = 64;
  std::byte* address;
  size_t bytes;
  bool are_sums;
  int products = 0;  // that are under way
  // What they held at the last fence or product; the true value of sums that are under way.
  uint32_t bits[kMost];
};

struct WgmmaProduct {
  WgmmaShape shape;
  uint64_t b;
  bool accumulate;
  uint64_t b_hash;  // of the matrix as it was when the product began
  WgmmaRegisters* a;
  WgmmaRegisters* d;
};

// Of one thread; all lanes of a warp have the same products.
struct WgmmaQueue {
  bool fenced = false;                  // ever
  std::list<WgmmaRegisters> registers;  // without overlaps
  std::vector<WgmmaProduct> products;   // oldest first
  std::vector<size_t> group_ends;       // of the committed groups
};

// Four warps on their way into one wgmma.
struct WarpGroup {
  uint32_t arrived = 0;  // of the four
  uint32_t meetings = 0;
  uint32_t waiting[kWarpsPerGroup] = {};
  WgmmaProduct product;  // of the first warp that arrived
};

}  // namespace cuda_on_host
