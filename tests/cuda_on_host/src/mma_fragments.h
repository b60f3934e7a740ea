// The fragments of mma.m16n8k16 and the arithmetic of the tensor cores, for mma and wgmma alike.
//
// In lane l, with g = l / 4 and t = l % 4 (PTX ISA, fragments of m16n8k16):
// register i of A holds row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next;
// register i of B holds rows 2 t + 8 i and the next, column g;
// element i of C and D is row g + 8 (i / 2), column 2 t + i % 2.
#pragma once

#include <cstdint>

namespace cuda_on_host {

template <float (*kToFloat)(uint16_t)>
float half_of(uint32_t pair, int half) {
  return kToFloat(static_cast<uint16_t>(pair >> 16 * half));
}

template <float (*kToFloat)(uint16_t)>
void unpack_a(int lane, const uint32_t* registers, float (&a)[16][16]) {
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) {
      a[g + 8 * (i % 2)][2 * t + half + 8 * (i / 2)] = half_of<kToFloat>(registers[i], half);
    }
  }
}

template <float (*kToFloat)(uint16_t)>
void unpack_b(int lane, const uint32_t* registers, float (&b)[16][8]) {
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 2; ++i) {
    for (int half = 0; half < 2; ++half) {
      b[2 * t + half + 8 * i][g] = half_of<kToFloat>(registers[i], half);
    }
  }
}

inline int row_of_d(int lane, int i) { return lane / 4 + 8 * (i / 2); }
inline int column_of_d(int lane, int i) { return lane % 4 * 2 + i % 2; }

// In the order of k. The sums of a row are in an array of their own, which nothing can alias: -O2
// makes vectors of them.
template <int kColumns>
void multiply(const float (&a)[16][16], const float (&b)[16][kColumns],
              float (&products)[16][kColumns]) {
  for (int row = 0; row < 16; ++row) {
    float sums[kColumns] = {};
    for (int k = 0; k < 16; ++k) {
      const float x = a[row][k];
      for (int column = 0; column < kColumns; ++column) sums[column] += x * b[k][column];
    }
    for (int column = 0; column < kColumns; ++column) products[row][column] = sums[column];
  }
}

}  // namespace cuda_on_host
