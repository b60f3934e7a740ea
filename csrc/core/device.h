// All that the kernels (*.cu) know of the machine: launches, shared memory, element types and the
// instructions that CUDA C++ has no name for. Kernels contain no `asm` and no `#ifdef`.
//
// nvcc sees the first half. Any other compiler gets the same names from <cuda_on_host/device.h>
// (tests/cuda_on_host), which runs every CUDA thread as a fiber on the host: the tests, the
// sanitizers and coverage run the kernel sources as they are.
//
// Rules for kernel sources: launch with VL_LAUNCH; shared memory through VL_SHARED and
// VL_DYNAMIC_SHARED, never a bare __shared__; explicit instantiations repeat __grid_constant__.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "core/dtype.h"

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <string>
#include <type_traits>

// VL_LAUNCH((kernel<A, B>), grid, block, dynamic_shared_bytes, stream, arguments...): `stream` is
// the op's integer. Throws Error if the launch is refused.
#define VL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                        \
  do {                                                                                   \
    kernel<<<(grid), (block), (shared_bytes), ::vllm_lite::device::as_stream(stream)>>>( \
        __VA_ARGS__);                                                                    \
    ::vllm_lite::device::check_cuda(cudaGetLastError(), #kernel);                        \
  } while (false)
// VL_SHARED(float, sums, [4][32]): a static shared array of the block.
#define VL_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
// The block's dynamic shared memory, 1024-byte aligned.
#define VL_DYNAMIC_SHARED(type, name)                                  \
  extern __shared__ __align__(1024) unsigned char vl_dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(vl_dynamic_shared)

namespace vllm_lite {

// Storage types; arithmetic is in float32.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {  // finite: no infinity, 448 at most
  uint8_t bits;
};

namespace device {

inline cudaStream_t as_stream(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

inline void check_cuda(cudaError_t error, const char* what) {
  VL_CHECK(error == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(error));
}

// ---- host side

inline int current_device() {
  int current = 0;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  return current;
}
// Of the current device.
inline int attribute(cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, current_device()), "cudaDeviceGetAttribute");
  return value;
}
inline int num_multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

// Bytes of dynamic shared memory that one block may use on the current device.
inline int max_dynamic_shared_bytes() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Lets `kernel` use more than 48 KiB of dynamic shared memory.
template <typename Kernel>
void allow_dynamic_shared(Kernel kernel, int bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "cudaFuncSetAttribute");
}

// Blocks of `kernel` that run at once on one multiprocessor.
template <typename Kernel>
int blocks_per_multiprocessor(Kernel kernel, int threads, int dynamic_shared_bytes) {
  int blocks = 0;
  check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, dynamic_shared_bytes),
      "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

// Between any two of host (pinned) and device memory, in stream order.
inline void copy_async(void* to, const void* from, int64_t bytes, int64_t stream) {
  check_cuda(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, as_stream(stream)),
      "cudaMemcpyAsync");
}
inline void fill_async(void* to, int byte, int64_t bytes, int64_t stream) {
  check_cuda(cudaMemsetAsync(to, byte, static_cast<size_t>(bytes), as_stream(stream)),
             "cudaMemsetAsync");
}

inline void synchronize(int64_t stream) {
  check_cuda(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
}

// ---- element types

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(Float16 x) {
  return __half2float(__ushort_as_half(x.bits));
}
__device__ __forceinline__ float to_float(Float8E4M3 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
#else
  // There is no instruction, and the toolkit's own code branches: so, as on the host, exponent and
  // fraction are put where float32 has them, and the product makes up for the other bias.
  const uint32_t sign = (x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
  const float scaled = __uint_as_float(magnitude << 20) * 0x1p120f;
  return __uint_as_float(magnitude == 0x7fu ? 0x7fffffffu : sign | __float_as_uint(scaled));
#endif
}

// To the nearest, ties to even. Float8E4M3 saturates at 448.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ __forceinline__ Float16 from_float<Float16>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}
template <>
__device__ __forceinline__ Float8E4M3 from_float<Float8E4M3>(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
}

// Two values in one register, `low` in the low half: the order of an mma fragment.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack<Float16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// ---- arithmetic

// x. What is computed from it is computed where it stands, not once ahead of a loop and kept in
// registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 2^x, relative error about 2^-22; subnormal results are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Absolute error about 2^-11; sm_75 and newer.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- tensor cores; fragments as in the PTX ISA

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// d[16x8] += a[16x16] b[16x8], float32 sums; T: BFloat16 or Float16.
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void mma_16x8x16<BFloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                      const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_16x8x16<Float16>(float (&d)[4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// ---- asynchronous copies (sm_80)

// 16 bytes from global to shared memory; zeros if not `valid` (`from` is then not read). The bytes
// are there after commit and wait by the same thread; others need a barrier, too.
__device__ __forceinline__ void copy_16_async(void* to_shared, const void* from,
                                              bool valid = true) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
      "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most kPending of this thread's latest groups are still on their way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- barriers of a part of the block

// Barrier `id` (1 to 15) of `threads` threads in all, whole warps.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Counts for the barrier without waiting at it.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- mbarriers and bulk copies (sm_90; a kernel that reaches them on an older device traps)
//
// An mbarrier is a uint64_t in shared memory. A phase ends when all arrivals are there and all
// bytes that they expect have been copied; then the next one begins. The first has parity 0.

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define VL_SM90_ASM(...) asm volatile(__VA_ARGS__)
#else
#define VL_SM90_ASM(...) __trap()
#endif
// Whether the running code was compiled for a device that has them.
__device__ constexpr bool has_bulk_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

// By one thread; the others may use it after a barrier.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  VL_SM90_ASM("mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.proxy.async.shared::cta;" ::"r"(
                  shared_address(barrier)),
              "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  VL_SM90_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and makes the phase wait for `bytes` more bytes.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  VL_SM90_ASM(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes) : "memory");
}
// Until the phase of this parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  VL_SM90_ASM(
      "{\n\t.reg .pred p;\n\tTRY:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
      "@!p bra TRY;\n\t}" ::"r"(shared_address(barrier)),
      "r"(parity) : "memory");
}
// From global to shared memory, by one thread: a multiple of 16 bytes, both sides 16-byte aligned.
// Counts for the mbarrier's expected bytes when it is done.
__device__ __forceinline__ void copy_bulk_async(void* to_shared, const void* from, uint32_t bytes,
                                                uint64_t* barrier) {
  VL_SM90_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to_shared)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
// Makes this thread's writes to shared memory so far visible to what the bulk copies and wgmma do,
// and orders them before its own later bulk copies.
__device__ __forceinline__ void fence_async_proxy() {
  VL_SM90_ASM("fence.proxy.async.shared::cta;" :: : "memory");
}
#undef VL_SM90_ASM

// ---- wgmma (sm_90a; elsewhere a kernel that reaches it traps): by a warpgroup, four warps that
// start at a multiple of four.
//
// The products are under way until they are waited for. Until then nobody may touch their sums, the
// registers of `a`, or the matrix in shared memory.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VL_SM90A_ASM(...) asm volatile(__VA_ARGS__)
#else
#define VL_SM90A_ASM(...) __trap()
#endif
__device__ constexpr bool has_wgmma() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return true;
#else
  return false;
#endif
}

// Before the first product, and before one whose registers were written since the last.
__device__ __forceinline__ void wgmma_fence() {
  VL_SM90A_ASM("wgmma.fence.sync.aligned;" :: : "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  VL_SM90A_ASM("wgmma.commit_group.sync.aligned;" :: : "memory");
}
// Registers of each thread of this warpgroup from now on, a multiple of 8: those of the launch are
// handed back, or more taken when others have handed theirs back.
template <int kRegisters>
__device__ __forceinline__ void keep_registers() {
  VL_SM90A_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  VL_SM90A_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Until at most kPending of the latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  VL_SM90A_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A matrix of 16-bit elements in shared memory, for wgmma: [columns / 64][rows][64 columns], each
// row of 64 in 128 bytes, of which the 16-byte chunk c of row r is stored at c ^ (r % 8). `p`: an
// even 16-byte chunk of row r of the stored matrix with r % 8 == 0; all of it 1024-byte aligned.
// column_block_bytes: from one block of 64 columns to the next.
__device__ __forceinline__ uint64_t wgmma_matrix(const void* p, int column_block_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | static_cast<uint64_t>(column_block_bytes / 16) << 16 |
         (shared_address(p) & 0x3ffff) / 16;
}

// d[64 x 8 kBlocks] = a[64x16] b[16 x 8 kBlocks], plus d if `accumulate`; float32 sums. Warp w of
// the group holds rows 16 w to 16 w + 15 of a and d, as the fragments of mma_16x8x16 have them.
// b is a wgmma_matrix: kRows: its stored rows are the rows of b (16, from p on; the columns are all
// that kBlocks says); otherwise they are the columns of b (8 kBlocks of them, and the rows of b are
// the 16 stored columns from p on).
enum class WgmmaB { kRows, kColumns };

#define VL_WGMMA_SUMS_8                                                                     \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n\t}"
#define VL_WGMMA_SUMS_16                                                                     \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"  \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45," \
  "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "               \
  "{%64,%65,%66,%67}, %68, p, 1, 1, %70;\n\t}"
#define VL_WGMMA_4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define VL_WGMMA_32(d, n)                                                             \
  VL_WGMMA_4(d[n]), VL_WGMMA_4(d[n + 1]), VL_WGMMA_4(d[n + 2]), VL_WGMMA_4(d[n + 3]), \
      VL_WGMMA_4(d[n + 4]), VL_WGMMA_4(d[n + 5]), VL_WGMMA_4(d[n + 6]), VL_WGMMA_4(d[n + 7])
#define VL_WGMMA_INPUTS                                                                  \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), \
      "n"(kB == WgmmaB::kRows ? 1 : 0)
#define VL_WGMMA_TEXT(accumulate, shape, type, sums)                                               \
  "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " accumulate ", 0;\n\twgmma.mma_async.sync.aligned." shape \
  ".f32." type "." type " " sums

template <typename T, WgmmaB kB, int kBlocks>
__device__ __forceinline__ void wgmma(float (&d)[kBlocks][4], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  static_assert(kBlocks == 8 || kBlocks == 16);
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  if constexpr (kBlocks == 8 && std::is_same_v<T, BFloat16>) {
    VL_SM90A_ASM(VL_WGMMA_TEXT("%37", "m64n64k16", "bf16", VL_WGMMA_SUMS_8) : VL_WGMMA_32(
        d, 0) : VL_WGMMA_INPUTS);
  } else if constexpr (kBlocks == 8) {
    VL_SM90A_ASM(VL_WGMMA_TEXT("%37", "m64n64k16", "f16", VL_WGMMA_SUMS_8) : VL_WGMMA_32(
        d, 0) : VL_WGMMA_INPUTS);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    VL_SM90A_ASM(VL_WGMMA_TEXT("%69", "m64n128k16", "bf16", VL_WGMMA_SUMS_16) : VL_WGMMA_32(d, 0),
                 VL_WGMMA_32(d, 8) : VL_WGMMA_INPUTS);
  } else {
    VL_SM90A_ASM(VL_WGMMA_TEXT("%69", "m64n128k16", "f16", VL_WGMMA_SUMS_16) : VL_WGMMA_32(d, 0),
                 VL_WGMMA_32(d, 8) : VL_WGMMA_INPUTS);
  }
}
#undef VL_WGMMA_SUMS_8
#undef VL_WGMMA_SUMS_16
#undef VL_WGMMA_4
#undef VL_WGMMA_32
#undef VL_WGMMA_INPUTS
#undef VL_WGMMA_TEXT
#undef VL_SM90A_ASM

}  // namespace device
}  // namespace vllm_lite

#else
#include <cuda_on_host/device.h>
#endif
