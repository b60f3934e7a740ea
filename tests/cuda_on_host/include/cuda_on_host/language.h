// What the CUDA compiler adds to C++ and kernels use: qualifiers, vector types, dim3.
#pragma once

#if defined(__CUDACC__)
#error "the host layer stands in for nvcc: it is not for sources that nvcc compiles"
#endif

#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
// __shared__ stays undefined: sanitizers do not see overruns of what it would have to become.

#define CUDA_ON_HOST_VECTOR_2(name, element, alignment) \
  struct alignas(alignment) name##2 { element x, y; };  \
  constexpr name##2 make_##name##2(element x, element y) { return {x, y}; }
#define CUDA_ON_HOST_VECTOR_3(name, element) \
  struct name##3 { element x, y, z; };       \
  constexpr name##3 make_##name##3(element x, element y, element z) { return {x, y, z}; }
#define CUDA_ON_HOST_VECTOR_4(name, element, alignment)                          \
  struct alignas(alignment) name##4 { element x, y, z, w; };                     \
  constexpr name##4 make_##name##4(element x, element y, element z, element w) { \
    return {x, y, z, w};                                                         \
  }

CUDA_ON_HOST_VECTOR_2(char, signed char, 2)
CUDA_ON_HOST_VECTOR_2(uchar, unsigned char, 2)
CUDA_ON_HOST_VECTOR_2(short, short, 4)
CUDA_ON_HOST_VECTOR_2(ushort, unsigned short, 4)
CUDA_ON_HOST_VECTOR_2(int, int, 8)
CUDA_ON_HOST_VECTOR_2(uint, unsigned, 8)
CUDA_ON_HOST_VECTOR_2(longlong, long long, 16)
CUDA_ON_HOST_VECTOR_2(ulonglong, unsigned long long, 16)
CUDA_ON_HOST_VECTOR_2(float, float, 8)
CUDA_ON_HOST_VECTOR_2(double, double, 16)
CUDA_ON_HOST_VECTOR_3(int, int)
CUDA_ON_HOST_VECTOR_3(uint, unsigned)
CUDA_ON_HOST_VECTOR_3(float, float)
CUDA_ON_HOST_VECTOR_4(char, signed char, 4)
CUDA_ON_HOST_VECTOR_4(uchar, unsigned char, 4)
CUDA_ON_HOST_VECTOR_4(short, short, 8)
CUDA_ON_HOST_VECTOR_4(ushort, unsigned short, 8)
CUDA_ON_HOST_VECTOR_4(int, int, 16)
CUDA_ON_HOST_VECTOR_4(uint, unsigned, 16)
CUDA_ON_HOST_VECTOR_4(float, float, 16)

#undef CUDA_ON_HOST_VECTOR_2
#undef CUDA_ON_HOST_VECTOR_3
#undef CUDA_ON_HOST_VECTOR_4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)
      : x(x_size), y(y_size), z(z_size) {}
};
