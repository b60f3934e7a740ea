// mma.sync and ldmatrix, with the fragment layouts of the PTX ISA.
#pragma once

#include <cstdint>

namespace cuda_on_host {

enum class Float16Kind { kBFloat16, kFloat16 };

// d[16x8] += a[16x16] b[16x8]. Products and sums in float32, in the order of k; a device sums in an
// order and precision of its own.
void mma_16x8x16(Float16Kind kind, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

// ldmatrix.x4: lane i gives the address of row i % 8 of matrix i / 8.
void load_matrices(uint32_t (&r)[4], const void* row, bool transposed);

}  // namespace cuda_on_host
