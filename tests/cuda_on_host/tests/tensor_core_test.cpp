#include <array>
#include <cmath>

#include "kernel_test.h"

namespace {

using namespace vllm_lite;
using namespace vllm_lite::device;

class TensorCore : public KernelTest {};

// ---- mma. The tables of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point
// type", as they are printed there: groupID = lane >> 2, threadID_in_group = lane % 4.

int row_of_a(int lane, int i) {
  const int group = lane >> 2;
  return (0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8;
}
int column_of_a(int lane, int i) { return lane % 4 * 2 + (i & 1) + (i < 4 ? 0 : 8); }
int row_of_b(int lane, int i) { return lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8); }
int column_of_b(int lane, int) { return lane >> 2; }
int row_of_c(int lane, int i) { return i < 2 ? lane >> 2 : (lane >> 2) + 8; }
int column_of_c(int lane, int i) { return lane % 4 * 2 + (i & 1); }

struct Fragments {
  uint32_t a[4], b[2];
  float d[4];
};

template <typename T>
__global__ void mma_kernel(Fragments* fragments) {
  Fragments& f = fragments[threadIdx.x];
  mma_16x8x16<T>(f.d, f.a, f.b);
}

template <typename T>
void check_mma() {
  std::mt19937 random(3);
  std::uniform_int_distribution<int> small(-8, 8);  // sums are exact
  float a[16][16], b[16][8], c[16][8], d[16][8];
  for (auto& row : a)
    for (float& x : row) x = static_cast<float>(small(random));
  for (auto& row : b)
    for (float& x : row) x = static_cast<float>(small(random));
  for (auto& row : c)
    for (float& x : row) x = static_cast<float>(small(random)) * 0.25f;
  Fragments fragments[32];
  for (int lane = 0; lane < 32; ++lane) {
    Fragments& f = fragments[lane];
    for (int i = 0; i < 4; ++i) {
      f.a[i] = pack<T>(a[row_of_a(lane, 2 * i)][column_of_a(lane, 2 * i)],
                       a[row_of_a(lane, 2 * i + 1)][column_of_a(lane, 2 * i + 1)]);
      f.d[i] = c[row_of_c(lane, i)][column_of_c(lane, i)];
    }
    for (int i = 0; i < 2; ++i) {
      f.b[i] = pack<T>(b[row_of_b(lane, 2 * i)][column_of_b(lane, 2 * i)],
                       b[row_of_b(lane, 2 * i + 1)][column_of_b(lane, 2 * i + 1)]);
    }
  }
  VL_LAUNCH(mma_kernel<T>, 1, 32, 0, 0, fragments);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) d[row_of_c(lane, i)][column_of_c(lane, i)] = fragments[lane].d[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = c[row][column];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      EXPECT_EQ(d[row][column], sum) << row << " " << column;
    }
  }
}

TEST_F(TensorCore, MmaIsTheMatrixProductOfItsFragments) {
  for_each_order([] {
    check_mma<BFloat16>();
    check_mma<Float16>();
  });
}

// ---- ldmatrix

struct Loaded {
  uint32_t r[4], transposed[4];
};

// Row r of the 32 rows (four matrices of 8) at r * stride elements.
__global__ void load_kernel(const uint16_t* values, int stride, Loaded* out) {
  VL_DYNAMIC_SHARED(uint16_t, shared);
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 8; ++i) shared[lane * stride + i] = values[lane * 8 + i];
  __syncwarp();
  load_matrices(out[lane].r, shared + lane * stride);
  load_matrices_transposed(out[lane].transposed, shared + lane * stride);
}

TEST_F(TensorCore, LdmatrixBothWays) {
  std::vector<uint16_t> values(32 * 8);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i * 251);
  for_each_order([&] {
    Loaded out[32];
    VL_LAUNCH(load_kernel, 1, 32, 32 * 8 * 2, 0, values.data(), 8, out);
    // PTX ISA: lane l receives row l / 4, columns 2 (l % 4) and the next, of each matrix.
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const auto element = [&](int row, int column) -> uint32_t {
          return values[(matrix * 8 + row) * 8 + column];
        };
        const int i = lane / 4, j = lane % 4 * 2;
        EXPECT_EQ(out[lane].r[matrix], element(i, j) | element(i, j + 1) << 16);
        EXPECT_EQ(out[lane].transposed[matrix], element(j, i) | element(j + 1, i) << 16);
      }
    }
  });
}

uint64_t conflicts_with_stride(int stride) {
  const std::vector<uint16_t> values(32 * 8);
  Loaded out[32];
  const cuda_on_host::Counters before = cuda_on_host::counters();
  VL_LAUNCH(load_kernel, 1, 32, 32 * stride * 2, 0, values.data(), stride, out);
  const cuda_on_host::Counters after = cuda_on_host::counters();
  EXPECT_EQ(after.matrix_loads - before.matrix_loads, 8);  // x4, two instructions
  return after.bank_conflicts - before.bank_conflicts;
}

TEST_F(TensorCore, BankConflictsAreCounted) {
  EXPECT_EQ(conflicts_with_stride(8), 0);       // 16 bytes: all banks
  EXPECT_EQ(conflicts_with_stride(72), 0);      // padded
  EXPECT_EQ(conflicts_with_stride(64), 8 * 7);  // 128 bytes: one eighth of the banks
  EXPECT_EQ(conflicts_with_stride(16), 8 * 1);  // 32 bytes: two rows each
}

__global__ void same_row_for_all(Loaded* out) {
  VL_SHARED(uint4, row, );
  if (threadIdx.x == 0) row = make_uint4(1, 2, 3, 4);
  __syncwarp();
  load_matrices(out[threadIdx.x].r, &row);
}

TEST_F(TensorCore, OneAddressIsNoConflict) {
  Loaded out[32];
  const uint64_t before = cuda_on_host::counters().bank_conflicts;
  VL_LAUNCH(same_row_for_all, 1, 32, 0, 0, out);
  EXPECT_EQ(cuda_on_host::counters().bank_conflicts, before);
  EXPECT_EQ(out[5].r[2], 2);
}

// ---- errors

__global__ void misaligned_row(Loaded* out) {
  VL_SHARED(uint4, rows, [33]);
  auto* row = reinterpret_cast<uint32_t*>(&rows[threadIdx.x]) + (threadIdx.x == 11 ? 2 : 0);
  load_matrices(out[threadIdx.x].r, row);
}
__global__ void half_a_warp(Loaded* out) {
  VL_SHARED(uint4, rows, [32]);
  load_matrices(out[threadIdx.x].r, &rows[threadIdx.x]);
}
__global__ void mma_of_half_a_warp(Fragments* fragments) {
  Fragments& f = fragments[threadIdx.x];
  mma_16x8x16<BFloat16>(f.d, f.a, f.b);
}
__global__ void row_in_global(Loaded* out, const uint4* row) {
  load_matrices(out[threadIdx.x].r, row);
}

TEST_F(TensorCore, MisuseIsReportedWithBlockAndThread) {
  Loaded out[32];
  Fragments fragments[32] = {};
  const uint4 row{};
  EXPECT_EQ(error_of([&] { VL_LAUNCH(misaligned_row, 1, 32, 0, 0, out); }),
            "ldmatrix: a row is not 16-byte aligned [block (0,0,0) thread (11,0,0)]");
  EXPECT_CONTAINS(error_of([&] { VL_LAUNCH(half_a_warp, 1, 16, 0, 0, out); }),
                  "ldmatrix needs all 32 lanes of the warp [block (0,0,0)");
  EXPECT_CONTAINS(error_of([&] { VL_LAUNCH(mma_of_half_a_warp, 1, 16, 0, 0, fragments); }),
                  "mma.sync needs all 32 lanes of the warp [block (0,0,0)");
  EXPECT_CONTAINS(error_of([&] { VL_LAUNCH(row_in_global, 1, 32, 0, 0, out, &row); }),
                  "must be in shared memory is not [block (0,0,0) thread (0,0,0)]");
}

}  // namespace
