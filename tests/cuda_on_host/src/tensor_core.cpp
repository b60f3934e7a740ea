#include "cuda_on_host/tensor_core.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cuda_on_host/block.h"
#include "cuda_on_host/number_formats.h"
#include "cuda_on_host/shared_memory.h"
#include "mma_fragments.h"
#include "sanitizers.h"

namespace cuda_on_host {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;

void check_whole_warp(uint32_t lanes, const char* what) {
  if (lanes != kAllLanes) fail(std::string(what) + " needs all 32 lanes of the warp");
}

// ---- mma.m16n8k16

struct MmaOperands {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

template <float (*kToFloat)(uint16_t)>
void complete_mma(Warp& warp, uint32_t lanes) {
  check_whole_warp(lanes, "mma.sync");
  float a[16][16], b[16][8], products[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& operands = *static_cast<MmaOperands*>(warp.threads[lane]->operands);
    unpack_a<kToFloat>(lane, operands.a, a);
    unpack_b<kToFloat>(lane, operands.b, b);
  }
  multiply(a, b, products);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* d = static_cast<MmaOperands*>(warp.threads[lane]->operands)->d;
    for (int i = 0; i < 4; ++i) d[i] += products[row_of_d(lane, i)][column_of_d(lane, i)];
  }
}

constexpr Collective kMma[] = {{"mma.sync bf16", complete_mma<bfloat16_to_float>},
                               {"mma.sync f16", complete_mma<float16_to_float>}};

// ---- ldmatrix

constexpr int kMatrixRows = 8;
constexpr uint32_t kRowBytes = 16;

struct LoadOperands {
  uint16_t row[kMatrixRows];
  uint32_t address;
  uint32_t* registers;
};

// The 32 banks hold 8 rows of 16 bytes: a matrix takes as many passes as the fullest eighth of the
// banks has different rows.
uint32_t passes(const uint32_t (&addresses)[kMatrixRows]) {
  uint32_t rows[kMatrixRows] = {}, most = 0;
  for (int i = 0; i < kMatrixRows; ++i) {
    if (std::find(addresses, addresses + i, addresses[i]) != addresses + i) continue;
    most = std::max(most, ++rows[addresses[i] / kRowBytes % kMatrixRows]);
  }
  return most;
}

template <bool kTransposed>
void complete_load(Warp& warp, uint32_t lanes) {
  check_whole_warp(lanes, "ldmatrix");
  const auto operands = [&warp](int lane) -> LoadOperands& {
    return *static_cast<LoadOperands*>(warp.threads[lane]->operands);
  };
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint32_t addresses[kMatrixRows];
    uint16_t elements[kMatrixRows][kMatrixRows];
    for (int row = 0; row < kMatrixRows; ++row) {
      const LoadOperands& source = operands(matrix * kMatrixRows + row);
      addresses[row] = source.address;
      std::memcpy(elements[row], source.row, kRowBytes);
    }
    current.block->num_matrix_loads += 1;
    current.block->num_bank_conflicts += passes(addresses) - 1;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int i = lane / 4, j = lane % 4 * 2;
      const uint32_t low = kTransposed ? elements[j][i] : elements[i][j];
      const uint32_t high = kTransposed ? elements[j + 1][i] : elements[i][j + 1];
      operands(lane).registers[matrix] = low | high << 16;
    }
  }
}

constexpr Collective kLoad{"ldmatrix", complete_load<false>};
constexpr Collective kLoadTransposed{"ldmatrix.trans", complete_load<true>};

}  // namespace

void mma_16x8x16(Float16Kind kind, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaOperands operands{d, a, b};
  meet(kMma[static_cast<int>(kind)], kAllLanes, &operands);
}

void load_matrices(uint32_t (&r)[4], const void* row, bool transposed) {
  const KernelFrame frame(__builtin_return_address(0));
  LoadOperands operands;
  operands.address = shared_address(row);
  operands.registers = r;
  if (operands.address % kRowBytes != 0) fail("ldmatrix: a row is not 16-byte aligned");
  announce_read(row, kRowBytes);
  std::memcpy(operands.row, row, kRowBytes);
  meet(transposed ? kLoadTransposed : kLoad, kAllLanes, &operands);
}

}  // namespace cuda_on_host
