// Vector passes of the sampler; see sample_passes.h for what keeps them bit-equal on every
// instruction set.
//
// Written in the compiler's vector extension at the native width: only "any lane set?" and the
// 32 x 32 -> 64 multiply need an intrinsic. simd.h's fma and exp are not used: they round
// differently on different sets.
#include <cstdint>
#include <cstring>

#include "core/isa.h"
#include "core/simd.h"
#include "ops/sample_math.h"
#include "ops/sample_passes.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr int kChunk = 64;  // elements that are looked at together
constexpr float kInfinity = __builtin_inff();

typedef uint32_t UintLanes __attribute__((vector_size(kWidth * 4)));
typedef uint64_t WideLanes __attribute__((vector_size(kWidth * 4)));  // kWidth / 2 of them
typedef double DoubleLanes __attribute__((vector_size(kWidth * 4)));
typedef float HalfFloatLanes __attribute__((vector_size(kWidth * 2)));

VL_SIMD bool any(IntLanes mask) {
#if defined(VL_ISA_avx512)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(VL_ISA_avx2)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
  int32_t all = 0;
  for (int lane = 0; lane < kWidth; ++lane) all |= mask[lane];
  return all != 0;
#endif
}

// The product of the lower 32 bits of each 64-bit lane.
VL_SIMD WideLanes multiply_low(WideLanes a, uint32_t b) {
  const WideLanes factor = WideLanes{} + b;
#if defined(VL_ISA_avx512)
  return (WideLanes)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)factor);
#elif defined(VL_ISA_avx2)
  return (WideLanes)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#else
  return (a & 0xffffffffull) * factor;
#endif
}

// Lanes beyond the row's end are -inf, which is never chosen and weighs nothing.
VL_SIMD FloatLanes load_row(const float* x, int64_t i, int64_t size) {
  if (i + kWidth <= size) return load(x + i).v;
  const int count = static_cast<int>(size - i);
  return lane_index() < count ? load_partial(x + i, count).v : broadcast(-kInfinity).v;
}

// exp(d) for d <= 0: weight_of in lanes.
VL_SIMD FloatLanes exp_nonpositive(FloatLanes d) {
  FloatLanes n;
  const FloatLanes fraction = exp_parts(d > kLeastExponent ? d : broadcast(kLeastExponent).v, &n);
  const IntLanes exponent = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  return fraction * (FloatLanes)exponent;
}

VL_SIMD WideLanes fixed_bits(HalfFloatLanes weights) {
  return (WideLanes)(__builtin_convertvector(weights, DoubleLanes) + kFixedPoint);
}
VL_SIMD HalfFloatLanes half(FloatLanes v, int which) {
  HalfFloatLanes h;
  std::memcpy(&h, reinterpret_cast<const char*>(&v) + which * sizeof(h), sizeof(h));
  return h;
}
VL_SIMD uint64_t fixed_point_bits() {
  uint64_t bits;
  std::memcpy(&bits, &kFixedPoint, sizeof(bits));
  return bits;
}

Peak find_peak(const float* x, int64_t size) {
  FloatLanes best = broadcast(-kInfinity).v;
  IntLanes best_id = IntLanes{} - 1, broken = IntLanes{}, id = lane_index();
  for (int64_t i = 0; i < size; i += kWidth) {
    const FloatLanes v = load_row(x, i, size);
    broken |= ~(v < kInfinity);  // true for NaN, too
    const IntLanes greater = v > best;
    best = greater ? v : best;
    best_id = greater ? id : best_id;
    id += kWidth;
  }
  Peak peak{-kInfinity, -1, any(broken)};
  for (int lane = 0; lane < kWidth; ++lane) {
    const bool wins = best[lane] > peak.value ||
                      (best[lane] == peak.value && best_id[lane] >= 0 && best_id[lane] < peak.id);
    if (wins) peak = {best[lane], best_id[lane], peak.broken};
  }
  return peak;
}

int64_t sum_weights(const float* x, int64_t size, float max_value, float scale) {
  WideLanes sum = WideLanes{};
  uint64_t num_added = 0;
  for (int64_t i = 0; i < size; i += kWidth) {
    const FloatLanes v = load_row(x, i, size);
    const FloatLanes w = exp_nonpositive((v - max_value) * scale);
    sum += fixed_bits(half(w, 0)) + fixed_bits(half(w, 1));
    num_added += 2;
  }
  uint64_t total = 0;
  for (int lane = 0; lane < kWidth / 2; ++lane) total += sum[lane] - num_added * fixed_point_bits();
  return static_cast<int64_t>(total);
}

void weights(const float* x, int64_t size, float max_value, float scale, int64_t* out) {
  for (int64_t i = 0; i < size; i += kWidth) {
    const FloatLanes v = load_row(x, i, size);
    const FloatLanes w = exp_nonpositive((v - max_value) * scale);
    int64_t fixed[kWidth];
    const WideLanes low = fixed_bits(half(w, 0)) - fixed_point_bits();
    const WideLanes high = fixed_bits(half(w, 1)) - fixed_point_bits();
    std::memcpy(fixed, &low, sizeof(low));
    std::memcpy(fixed + kWidth / 2, &high, sizeof(high));
    for (int lane = 0; lane < kWidth && i + lane < size; ++lane) out[i + lane] = fixed[lane];
  }
}

int64_t count_above(const float* x, int64_t size, float threshold) {
  IntLanes count = IntLanes{};
  for (int64_t i = 0; i < size; i += kWidth) {
    count -= load_row(x, i, size) > threshold;
  }
  int64_t total = 0;
  for (int lane = 0; lane < kWidth; ++lane) total += count[lane];
  return total;
}

int64_t collect_above(const float* x, int64_t begin, int64_t size, float threshold, int32_t* ids,
                      int64_t capacity, int64_t* count) {
  int64_t n = *count, i = begin;
  for (; i < size && capacity - n >= kCollectRoom; i += kChunk) {
    const int64_t end = i + kChunk <= size ? i + kChunk : size;
    if (end - i == kChunk) {
      IntLanes found = IntLanes{};
      for (int j = 0; j < kChunk; j += kWidth) found |= load(x + i + j).v > threshold;
      if (!any(found)) continue;
    }
    for (int64_t j = i; j < end; ++j) {
      ids[n] = static_cast<int32_t>(j);
      n += x[j] > threshold;
    }
  }
  *count = n;
  return i < size ? i : size;
}

void penalize(float* x, int64_t size, const int32_t* output_counts, const uint8_t* prompt_mask,
              float repetition, float frequency, float presence) {
  for (int64_t i = 0; i < size; ++i) {
    x[i] = penalized(x[i], output_counts[i], prompt_mask[i] != 0, repetition, frequency, presence);
  }
}

// Philox words of the counters (id / 4 ...) of one chunk, as word w of counter c at [w][c].
struct ChunkNoise {
  uint64_t words[4][kChunk / 4];  // low 32 bits count
};

// Computes the noise of ids [first_id, first_id + kChunk) and tells whether any ~word is below
// `limit`. Counters are zero-extended in 64-bit lanes, so that a product's halves are a shift
// apart; what stands above bit 31 is ignored by the next multiply.
VL_SIMD bool philox_chunk(uint32_t first_id, uint32_t position, uint64_t seed, uint32_t limit,
                          ChunkNoise* noise) {
  constexpr int kVectors = kChunk / 4 / (kWidth / 2);
  WideLanes c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
  WideLanes lanes = WideLanes{};
  for (int lane = 0; lane < kWidth / 2; ++lane) lanes[lane] = static_cast<uint32_t>(lane);
  for (int v = 0; v < kVectors; ++v) {
    c0[v] = lanes + uint64_t{first_id / 4 + static_cast<uint32_t>(v * (kWidth / 2))};
    c1[v] = WideLanes{} + position;
    c2[v] = c3[v] = WideLanes{};
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int v = 0; v < kVectors; ++v) {
      const WideLanes product0 = multiply_low(c0[v], kPhiloxM0);
      const WideLanes product1 = multiply_low(c2[v], kPhiloxM1);
      c0[v] = (product1 >> 32) ^ c1[v] ^ uint64_t { key0 };
      c2[v] = (product0 >> 32) ^ c3[v] ^ uint64_t { key1 };
      c1[v] = product1;
      c3[v] = product0;
    }
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  IntLanes found = IntLanes{};
  for (int v = 0; v < kVectors; ++v) {
    const UintLanes even = (UintLanes)((c0[v] & 0xffffffffull) | (c1[v] << 32));
    const UintLanes odd = (UintLanes)((c2[v] & 0xffffffffull) | (c3[v] << 32));
    found |= (~even < limit) | (~odd < limit);
    std::memcpy(noise->words[0] + v * (kWidth / 2), &c0[v], sizeof(WideLanes));
    std::memcpy(noise->words[1] + v * (kWidth / 2), &c1[v], sizeof(WideLanes));
    std::memcpy(noise->words[2] + v * (kWidth / 2), &c2[v], sizeof(WideLanes));
    std::memcpy(noise->words[3] + v * (kWidth / 2), &c3[v], sizeof(WideLanes));
  }
  return any(found);
}

// No noise is computed for a chunk whose best logit cannot win, either.
int32_t draw(const DrawParams& p) {
  const uint32_t peak_bits = philox_word(p.seed, p.position, p.peak.id);
  double best = gumbel(peak_bits);
  int32_t best_id = p.peak.id;
  ChunkNoise noise;
  for (int32_t i = 0; i < p.size; i += kChunk) {
    FloatLanes largest = broadcast(-kInfinity).v;
    for (int j = 0; j < kChunk && i + j < p.size; j += kWidth) {
      largest = max({largest}, {load_row(p.x, i + j, p.size)}).v;
    }
    if (!any(largest >= p.cut_value)) continue;
    const double chunk_scaled = (reduce_max({largest}) - p.peak.value) * p.scale;
    if (chunk_scaled < p.min_scaled || chunk_scaled + kMaxGumbel < best) continue;
    const uint32_t limit = winning_limit(chunk_scaled - best);
    if (!philox_chunk(static_cast<uint32_t>(i), p.position, p.seed, limit, &noise)) continue;
    for (int32_t id = i; id < p.size && id < i + kChunk; ++id) {
      const uint32_t bits = static_cast<uint32_t>(noise.words[id % 4][(id - i) / 4]);
      const float x = p.x[id];
      if (~bits >= limit || !(x > p.cut_value || (x == p.cut_value && id <= p.cut_id))) continue;
      const float scaled = (x - p.peak.value) * p.scale;
      if (scaled < p.min_scaled) continue;
      const double score = scaled + gumbel(bits);
      if (score > best || (score == best && id < best_id)) {
        best = score;
        best_id = id;
      }
    }
  }
  return best_id;
}

}  // namespace

const SamplePasses kSamplePasses = {find_peak,     sum_weights, weights, count_above,
                                    collect_above, penalize,    draw};

}  // namespace vllm_lite::VL_ISA
