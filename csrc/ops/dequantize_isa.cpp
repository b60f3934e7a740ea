// GGUF blocks to floats. A block is unpacked into floats by plain loops that the compiler
// vectorises, and stored in the output's type; the arithmetic rounds exactly as gguf-py's and
// ggml's does.
#include "core/isa.h"
#include "core/parallel_for.h"
#include "core/simd.h"
#include "ops/ops.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int64_t kElementsPerTask = 16384;

VL_SIMD float half_at(const uint8_t* bytes) {
  Float16 half;
  __builtin_memcpy(&half, bytes, sizeof(half));
  return to_float(half);
}

// Each format: elements and bytes of a block, and unpack(block, out[kElements]).

struct Q4_0 {
  static constexpr int kElements = 32, kBytes = 18;
  VL_SIMD void unpack(const uint8_t* block, float* out) {
    const float d = half_at(block);
    const uint8_t* quants = block + 2;
    for (int i = 0; i < 16; ++i) out[i] = d * static_cast<float>((quants[i] & 15) - 8);
    for (int i = 0; i < 16; ++i) out[i + 16] = d * static_cast<float>((quants[i] >> 4) - 8);
  }
};

struct Q4_1 {
  static constexpr int kElements = 32, kBytes = 20;
  VL_SIMD void unpack(const uint8_t* block, float* out) {
    const float d = half_at(block), minimum = half_at(block + 2);
    const uint8_t* quants = block + 4;
    for (int i = 0; i < 16; ++i) out[i] = d * static_cast<float>(quants[i] & 15) + minimum;
    for (int i = 0; i < 16; ++i) out[i + 16] = d * static_cast<float>(quants[i] >> 4) + minimum;
  }
};

struct Q8_0 {
  static constexpr int kElements = 32, kBytes = 34;
  VL_SIMD void unpack(const uint8_t* block, float* out) {
    const float d = half_at(block);
    const int8_t* quants = reinterpret_cast<const int8_t*>(block + 2);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(quants[i]) * d;
  }
};

// Eight 6-bit scales and minima in 12 bytes: four of each in the low bits of the first eight bytes,
// the low nibbles of the others in the last four, and their two high bits above the first ones.
struct ScaleMin {
  float scale, minimum;
};
VL_SIMD ScaleMin scale_min(const uint8_t* packed, int i, float d, float d_minimum) {
  const int low = i & 3;
  int scale = packed[low] & 63, minimum = packed[low + 4] & 63;
  if (i >= 4) {
    scale = (packed[low + 8] & 15) | (packed[low] >> 2 & 48);
    minimum = packed[low + 8] >> 4 | (packed[low + 4] >> 2 & 48);
  }
  return {d * static_cast<float>(scale), d_minimum * static_cast<float>(minimum)};
}

struct Q4_K {
  static constexpr int kElements = 256, kBytes = 144;
  VL_SIMD void unpack(const uint8_t* block, float* out) {
    const float d = half_at(block), d_minimum = half_at(block + 2);
    const uint8_t* quants = block + 16;
    for (int group = 0; group < 8; ++group, out += 32) {
      const ScaleMin s = scale_min(block + 4, group, d, d_minimum);
      const uint8_t* q = quants + group / 2 * 32;
      const int shift = group % 2 * 4;
      for (int i = 0; i < 32; ++i) {
        out[i] = s.scale * static_cast<float>(q[i] >> shift & 15) - s.minimum;
      }
    }
  }
};

struct Q5_K {
  static constexpr int kElements = 256, kBytes = 176;
  VL_SIMD void unpack(const uint8_t* block, float* out) {
    const float d = half_at(block), d_minimum = half_at(block + 2);
    const uint8_t* high = block + 16;
    const uint8_t* quants = block + 48;
    for (int group = 0; group < 8; ++group, out += 32) {
      const ScaleMin s = scale_min(block + 4, group, d, d_minimum);
      const uint8_t* q = quants + group / 2 * 32;
      const int shift = group % 2 * 4;
      for (int i = 0; i < 32; ++i) {
        const int quant = (q[i] >> shift & 15) | (high[i] >> group & 1) << 4;
        out[i] = s.scale * static_cast<float>(quant) - s.minimum;
      }
    }
  }
};

struct Q6_K {
  static constexpr int kElements = 256, kBytes = 210;
  VL_SIMD void unpack(const uint8_t* block, float* out) {
    const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192);
    const float d = half_at(block + 208);
    // A half of 128 elements is four groups of 32: low nibbles of 64 bytes, then their high ones;
    // the two bits above in 32 bytes, a pair of bits per group.
    for (int group = 0; group < 8; ++group, out += 32) {
      const int part = group / 4, in_part = group % 4;
      const uint8_t* low = block + part * 64 + in_part % 2 * 32;
      const uint8_t* high = block + 128 + part * 32;
      const int low_shift = in_part / 2 * 4, high_shift = in_part * 2;
      for (int begin = 0; begin < 32; begin += 16) {
        const float scale = d * static_cast<float>(scales[group * 2 + begin / 16]);
        for (int i = begin; i < begin + 16; ++i) {
          const int quant = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
          out[i] = scale * static_cast<float>(quant - 32);
        }
      }
    }
  }
};

template <typename Format, typename T>
void run_blocks(const DequantizeParams& p) {
  parallel_for(
      p.num_elements / Format::kElements, kElementsPerTask / Format::kElements,
      [&p](int64_t begin, int64_t end) {
        const uint8_t* block = static_cast<const uint8_t*>(p.blocks) + begin * Format::kBytes;
        T* out = static_cast<T*>(p.out) + begin * Format::kElements;
        float values[Format::kElements];
        for (int64_t b = begin; b < end; ++b, block += Format::kBytes, out += Format::kElements) {
          Format::unpack(block, values);
          for (int i = 0; i < Format::kElements; i += kWidth) store(out + i, load(values + i));
        }
      });
}

template <typename From, typename T>
void convert(const DequantizeParams& p) {
  parallel_for(p.num_elements, kElementsPerTask, [&p](int64_t begin, int64_t end) {
    const From* from = static_cast<const From*>(p.blocks);
    T* out = static_cast<T*>(p.out);
    int64_t i = begin;
    for (; i + kWidth <= end; i += kWidth) store(out + i, load(from + i));
    if (i == end) return;
    store_partial(out + i, load_partial(from + i, static_cast<int>(end - i)),
                  static_cast<int>(end - i));
  });
}

template <typename T>
void run(const DequantizeParams& p) {
  switch (p.type) {
    case GgmlType::kF32:
      return convert<float, T>(p);
    case GgmlType::kF16:
      return convert<Float16, T>(p);
    case GgmlType::kBF16:
      return convert<BFloat16, T>(p);
    case GgmlType::kQ4_0:
      return run_blocks<Q4_0, T>(p);
    case GgmlType::kQ4_1:
      return run_blocks<Q4_1, T>(p);
    case GgmlType::kQ8_0:
      return run_blocks<Q8_0, T>(p);
    case GgmlType::kQ4_K:
      return run_blocks<Q4_K, T>(p);
    case GgmlType::kQ5_K:
      return run_blocks<Q5_K, T>(p);
    case GgmlType::kQ6_K:
      return run_blocks<Q6_K, T>(p);
  }
}

}  // namespace

void dequantize(const DequantizeParams& params) {
  switch (params.dtype) {
    case DType::kFloat32:
      return run<float>(params);
    case DType::kBFloat16:
      return run<BFloat16>(params);
    case DType::kFloat16:
      return run<Float16>(params);
  }
}

}  // namespace vllm_lite::VL_ISA
