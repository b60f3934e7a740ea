// What one warp does with one tile of KV: scores, softmax, weights times values, for 16 rows and
// 64 keys, on tensor cores (mma.sync m16n8k16). Both attention kernels run this code and no other,
// so that a row's result has the same bits in either.
//
// Lane l holds rows l / 4 and l / 4 + 8 of the warp, as the mma fragments have it. Keys that a row
// does not see weigh exactly 0, and a tile of which it sees nothing changes none of its bits.
//
// An FP8 cache is widened to the query's type on the way from shared memory to registers. A 32-bit
// word of it holds four neighbours, two of which an mma fragment wants side by side, so two of the
// mma's dimensions are renumbered within their 16: the head's elements in scores, where the query
// is loaded to match, and the head's elements in `sums`, where value_column() says which they are.
#pragma once

#include "attention/attention_layout.cuh"

namespace vllm_lite {
namespace attention {

constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

// Whether both 16-bit values of a pair are finite.
__device__ __forceinline__ bool is_finite_pair(uint32_t pair, BFloat16) {
  return (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
}
__device__ __forceinline__ bool is_finite_pair(uint32_t pair, Float16) {
  return (pair & 0x7c00u) != 0x7c00u && (pair & 0x7c000000u) != 0x7c000000u;
}

// Bytes `low` and `high` of four FP8 values, as a pair of T.
template <typename T>
__device__ __forceinline__ uint32_t widen(uint32_t four, int low, int high) {
  const auto value = [four](int byte) {
    return device::to_float(Float8E4M3{static_cast<uint8_t>(four >> (8 * byte))});
  };
  return device::pack<T>(value(low), value(high));
}

// How a total and the result of the next range become the new total: the one place where ranges
// meet. Exact where one of the two has seen nothing: its weight and sums are 0.
struct Merge {
  float maximum, weight;
  float keep, take;  // factors of the total and of the range

  __device__ __forceinline__ Merge(float total_maximum, float total_weight, float part_maximum,
                                   float part_weight)
      : maximum(total_maximum), keep(1), take(0) {
    if (part_weight != 0) {
      const bool is_first = total_weight == 0;
      maximum = is_first ? part_maximum : fmaxf(total_maximum, part_maximum);
      keep = is_first ? 0.0f : device::exp2_approx(total_maximum - maximum);
      take = is_first ? 1.0f : device::exp2_approx(part_maximum - maximum);
    }
    weight = apply(total_weight, part_weight);
  }
  __device__ __forceinline__ float apply(float total, float part) const {
    return fmaf(part, take, total * keep);
  }
};

// An element of a result from its sum and the sum of its weights. The addition of 0 makes -0, which
// the order of a row's masked tiles may bring forth, 0.
__device__ __forceinline__ float result(float sum, float inverse_weight) {
  return inverse_weight == 0 ? 0.0f : fmaf(sum, inverse_weight, 0.0f);
}
__device__ __forceinline__ float inverse(float weight, float factor) {
  return weight == 0 ? 0.0f : factor / weight;
}

// From a score to its weight's exponent, to the base 2: score * scale. With a soft cap or ALiBi the
// score is bent first: it becomes score * inner + slope * distance, or the tanh of that.
struct ScoreFactors {
  float scale;  // > 0
  bool bends;
  bool has_cap;
  float inner;
  float slope;  // factor of the ALiBi slopes
};

// The rows of one warp, while they go through their KV.
// kPlain: no sliding window, and scores are not bent. Without it, whether they are is asked once
// per tile, so that a window alone costs next to nothing.
template <typename T, typename Kv, int kHeadSize, bool kPlain,
          typename Layout = PaddedLayout<Kv, kHeadSize>>
struct WarpRows {
  static constexpr bool kFp8 = sizeof(Kv) == 1;
  static constexpr int kSteps = kHeadSize / 16;  // of the mma along the head
  static constexpr int kBlocks = kHeadSize / 8;  // columns of 8 of the sums
  // Above that the query does not fit beside the sums, and is read again for every tile.
  static constexpr bool kQueryInRegisters = kHeadSize <= 128;
  // Shared memory of a warp: (maximum, weight) of its rows, the query, and the total, which may be
  // in local memory instead.
  static constexpr int kStateBytes = kDecodeRows * 8;
  static constexpr int kQueryBytes = kQueryInRegisters ? 0 : kSteps * 32 * 16;
  static constexpr int kTotalBytes = kBlocks * 32 * 16;
  static constexpr int kSharedBytes = kStateBytes + kQueryBytes + kTotalBytes;

  uint32_t query[kQueryInRegisters ? kSteps : 1][4];
  float scores[kTileTokens / 8][4];
  uint32_t weights[kTileTokens / 16][4];  // of a tile, as the left sides of mmas
  float sums[kBlocks][4];
  // Of this lane's two rows. `weight` is the lane's part until the range is finished; `correction`:
  // the factor that the last softmax found for the sums.
  float maximum[2], weight[2], correction[2];
  int position[2];  // -1 or less: sees nothing
  int window;       // keys that it sees at most
  float slope[2];
  ScoreFactors factors;
  float2* total_state;  // [16]
  uint4* shared_query;  // [kSteps][32]
  float4* total;        // [kBlocks] of this lane, as it holds the sums, total_stride apart
  int total_stride;

  // local_total: [kBlocks], or nullptr for a total in shared memory.
  __device__ __forceinline__ void begin(unsigned char* shared, float4* local_total) {
    total_state = reinterpret_cast<float2*>(shared);
    shared_query = reinterpret_cast<uint4*>(shared + kStateBytes);
    total = reinterpret_cast<float4*>(shared + kStateBytes + kQueryBytes) + lane_index();
    total_stride = 32;
    if (local_total != nullptr) {
      total = local_total;
      total_stride = 1;
    }
  }

  __device__ __forceinline__ void begin_range() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] = -infinity();
      weight[h] = 0;
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[b][j] = 0;
    }
  }

  // First of the two columns of `out` that sums[.][2h], of pair p, p < kBlocks, stand for.
  static __device__ __forceinline__ int value_column(int p) {
    const int t = lane_index() % 4;
    return kFp8 ? p / 2 * 16 + t * 4 + p % 2 * 2 : p * 8 + t * 2;
  }
  __device__ __forceinline__ float2 value_pair(int p, int h) const {
    if (kFp8) {
      const int even = p / 2 * 2, j = 2 * h + p % 2;
      return make_float2(sums[even][j], sums[even + 1][j]);
    }
    return make_float2(sums[p][2 * h], sums[p][2 * h + 1]);
  }

  // Rows of the query, nullptr for none.
  __device__ __forceinline__ void load_query(const T* const (&rows)[2]) {
    const int t = lane_index() % 4;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[4] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (rows[h] == nullptr) continue;
        const T* from = rows[h] + k * 16 + t * (kFp8 ? 4 : 2);
        a[h] = __ldg(reinterpret_cast<const uint32_t*>(from));
        a[h + 2] = __ldg(reinterpret_cast<const uint32_t*>(from + (kFp8 ? 2 : 8)));
      }
      if (kQueryInRegisters) {
#pragma unroll
        for (int j = 0; j < 4; ++j) query[kQueryInRegisters ? k : 0][j] = a[j];
      } else {
        shared_query[k * 32 + lane_index()] = make_uint4(a[0], a[1], a[2], a[3]);
      }
    }
  }

  // scores of keys 32 * kHalf .. 32 * kHalf + 31 of the tile.
  template <int kHalf>
  __device__ __forceinline__ void score(const unsigned char* keys) {
    const int lane = device::opaque(lane_index());
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[kHalf * 4 + n][j] = 0;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k % 2 == 0) keep_apart();
      uint32_t a[4];
      if (kQueryInRegisters) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = query[kQueryInRegisters ? k : 0][j];
      } else {
        const uint4 q = shared_query[k * 32 + lane];
        a[0] = q.x, a[1] = q.y, a[2] = q.z, a[3] = q.w;
      }
      uint32_t r[4];
      if constexpr (kFp8) {
        device::load_matrices(r, keys + Layout::offset(kHalf * kHalfTile + lane, k));
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint32_t b[2] = {widen<T>(r[n], 0, 1), widen<T>(r[n], 2, 3)};
          device::mma_16x8x16<T>(scores[kHalf * 4 + n], a, b);
        }
      } else {
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          const int row = kHalf * kHalfTile + n * 8 + lane % 8 + lane / 16 * 8;
          device::load_matrices(r, keys + Layout::offset(row, k * 2 + lane / 8 % 2));
          const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
          device::mma_16x8x16<T>(scores[kHalf * 4 + n], a, b0);
          device::mma_16x8x16<T>(scores[kHalf * 4 + n + 1], a, b1);
        }
      }
    }
  }

  // Scores become weights, in float32; take_weights() goes on with them. `start`: position of the
  // tile's first key. is_masked: some row does not see all of the tile.
  __device__ __forceinline__ void softmax(int start, bool is_masked) {
    const int first_key = start + lane_index() % 4 * 2;
    const auto for_each_score = [&](const auto& function) {
#pragma unroll
      for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          scores[n][j] = function(scores[n][j], first_key + n * 8 + j % 2, j / 2);
        }
      }
    };
    if (!kPlain && factors.bends) {
      for_each_score([&](float x, int key, int h) {
        x = fmaf(x, factors.inner, slope[h] * static_cast<float>(key - position[h]));
        return factors.has_cap ? tanh(x) : x;
      });
    }
    if (is_masked) {
      for_each_score([&](float x, int key, int h) {
        return (kPlain || key > position[h] - window) && key <= position[h] ? x : -infinity();
      });
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest = -infinity();
#pragma unroll
      for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          highest = fmaxf(highest, scores[n][2 * h + j]);
        }
      }
      highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kWholeWarp, highest, 2));
      highest *= factors.scale;
      const float old_maximum = maximum[h];
      maximum[h] = fmaxf(old_maximum, highest);
      // All scores so far may be -infinity, when their weights are 0, not NaN.
      const float shift = maximum[h] == -infinity() ? 0.0f : maximum[h];
      correction[h] = device::exp2_approx(old_maximum - shift);
      float tile_weight = 0;
#pragma unroll
      for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = scores[n][2 * h + j];
          x = device::exp2_approx(fmaf(x, factors.scale, -shift));
          tile_weight += x;
        }
      }
      weight[h] = fmaf(weight[h], correction[h], tile_weight);
    }
  }

  // The weights become the mmas' operands, and what was summed so far is rescaled to the maximum.
  __device__ __forceinline__ void take_weights() {
#pragma unroll
    for (int step = 0; step < kTileTokens / 16; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float (&x)[4] = scores[2 * step + j / 2];
        weights[step][j] = device::pack<T>(x[j % 2 * 2], x[j % 2 * 2 + 1]);
      }
    }
    // The maximum seldom changes after the first tiles; a factor of 1 changes no bit.
    if (__any_sync(kWholeWarp, correction[0] != 1 || correction[1] != 1)) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[b][j] *= correction[j / 2];
      }
    }
  }

  // sums += weights * values of half a tile. In a masked tile there may be values of keys that not
  // all rows see; a weight of 0 does not hide them if they are not finite.
  template <int kHalf>
  __device__ __forceinline__ void add_values(const unsigned char* values, int start,
                                             bool is_masked) {
    if (is_masked && !are_finite(values, kHalf)) {
      add_values_row_by_row<kHalf>(values, start);
      return;
    }
    const int lane = device::opaque(lane_index());
#pragma unroll
    for (int step = kHalf * 2; step < kHalf * 2 + 2; ++step) {
#pragma unroll
      for (int chunk = 0; chunk < Layout::kChunks; chunk += 2) {
        if (chunk % 8 == 0) keep_apart();
        for_each_block(values, step, chunk, lane, [&](int block, const uint32_t (&b)[2]) {
          device::mma_16x8x16<T>(sums[block], weights[step], b);
        });
      }
    }
  }

  // As score() and add_values(), by a warpgroup and under way until waited for; SwizzledLayout.
  __device__ __forceinline__ void score_async(const unsigned char* keys) {
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      device::wgmma<T, device::WgmmaB::kColumns>(
          scores, query[k],
          device::wgmma_matrix(keys + Layout::offset(0, k * 2), Layout::kColumnBlockBytes), k > 0);
    }
    device::wgmma_commit();
  }
  __device__ __forceinline__ void add_values_async(const unsigned char* values) {
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileTokens / 16; ++step) {
      device::wgmma<T, device::WgmmaB::kRows>(
          sums, weights[step],
          device::wgmma_matrix(values + Layout::offset(step * 16, 0), Layout::kColumnBlockBytes),
          true);
    }
    device::wgmma_commit();
  }

  // The lane's parts of the range's weights become the rows'.
  __device__ __forceinline__ void finish_range() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weight[h] += __shfl_xor_sync(kWholeWarp, weight[h], 1);
      weight[h] += __shfl_xor_sync(kWholeWarp, weight[h], 2);
    }
  }

  // sums, maximum and weight become those of the total, once the range is finished and merged.
  __device__ __forceinline__ void merge_total() {
    const int row = lane_index() / 4;
    __syncwarp();
    const float2 state[2] = {total_state[row], total_state[row + 8]};
    const Merge merge[2] = {{state[0].x, state[0].y, maximum[0], weight[0]},
                            {state[1].x, state[1].y, maximum[1], weight[1]}};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b % 4 == 0) __syncwarp();  // as keep_apart()
      const float4 t = total[b * total_stride];
      sums[b][0] = merge[0].apply(t.x, sums[b][0]);
      sums[b][1] = merge[0].apply(t.y, sums[b][1]);
      sums[b][2] = merge[1].apply(t.z, sums[b][2]);
      sums[b][3] = merge[1].apply(t.w, sums[b][3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] = merge[h].maximum;
      weight[h] = merge[h].weight;
    }
  }
  __device__ __forceinline__ void keep_total() {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      total[b * total_stride] = make_float4(sums[b][0], sums[b][1], sums[b][2], sums[b][3]);
    }
    if (lane_index() % 4 == 0) {
      total_state[lane_index() / 4] = make_float2(maximum[0], weight[0]);
      total_state[lane_index() / 4 + 8] = make_float2(maximum[1], weight[1]);
    }
  }

  // Whether half a tile of values is finite; the same answer for all lanes.
  static __device__ __forceinline__ bool are_finite(const unsigned char* values, int half) {
    const int lane = lane_index();
    bool finite = true;
#pragma unroll 1
    for (int step = half * 2; step < half * 2 + 2; ++step) {
#pragma unroll 2
      for (int chunk = 0; chunk < Layout::kChunks; chunk += 2) {
        for_each_block(values, step, chunk, lane, [&](int, const uint32_t (&b)[2]) {
          finite = finite && is_finite_pair(b[0], T{}) && is_finite_pair(b[1], T{});
        });
      }
    }
    return __all_sync(kWholeWarp, finite) != 0;
  }

  // add_values, but every row's with the values that it does not see replaced by 0. Rare and slow:
  // in loops, on a copy of the sums in local memory.
  template <int kHalf>
  __device__ __forceinline__ void add_values_row_by_row(const unsigned char* values, int start) {
    const int lane = lane_index();
    float copy[kBlocks][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < 4; ++j) copy[block][j] = sums[block][j];
    }
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const int source = row % 8 * 4;
      const int last = __shfl_sync(kWholeWarp, row < 8 ? position[0] : position[1], source);
      const int first = kPlain ? 0 : last - window + 1;
      const bool mine[2] = {lane / 4 == row, lane / 4 + 8 == row};
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const int step = 2 * kHalf + i;
        uint32_t a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          a[j] = mine[j % 2] ? (i == 0 ? weights[2 * kHalf][j] : weights[2 * kHalf + 1][j]) : 0;
#pragma unroll 1
        for (int chunk = 0; chunk < Layout::kChunks; chunk += 2) {
          for_each_block(values, step, chunk, lane, [&](int block, const uint32_t (&all)[2]) {
            uint32_t b[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int key = start + step * 16 + lane % 4 * 2 + j * 8;
              const bool low = key >= first && key <= last;
              const bool high = key + 1 >= first && key + 1 <= last;
              b[j] = all[j] & ((low ? 0x0000ffffu : 0u) | (high ? 0xffff0000u : 0u));
            }
            float d[4] = {copy[block][0], copy[block][1], copy[block][2], copy[block][3]};
            device::mma_16x8x16<T>(d, a, b);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              if (mine[j / 2]) copy[block][j] = d[j];
            }
          });
        }
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[block][j] = copy[block][j];
    }
  }

 private:
  // Between loads from shared memory that would not fit into the registers together.
  static __device__ __forceinline__ void keep_apart() {
    if (!kQueryInRegisters || (kFp8 && (kHeadSize == 80 || kHeadSize == 128))) __syncwarp();
  }

  static __device__ __forceinline__ float tanh(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + device::exp2_approx(x * (2 * kLog2E)));
  }

  // The values of keys 16 * step .. 16 * step + 15 and of a pair of chunks of 16 bytes, as the
  // right sides of mmas: function(block, b) for each block of eight columns.
  template <typename Function>
  static __device__ __forceinline__ void for_each_block(const unsigned char* values, int step,
                                                        int chunk, int lane,
                                                        const Function& function) {
    const int row = step * 16 + lane % 16;
    const bool is_pair = Layout::kChunks % 2 == 0 || chunk + 1 < Layout::kChunks;
    uint32_t r[4];
    device::load_matrices_transposed(
        r, values + Layout::offset(row, chunk + (is_pair ? lane / 16 : 0)));
    if constexpr (kFp8) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (c == 1 && !is_pair) continue;
        const uint32_t even[2] = {widen<T>(r[2 * c], 0, 2), widen<T>(r[2 * c + 1], 0, 2)};
        const uint32_t odd[2] = {widen<T>(r[2 * c], 1, 3), widen<T>(r[2 * c + 1], 1, 3)};
        function(2 * (chunk + c), even);
        function(2 * (chunk + c) + 1, odd);
      }
    } else {
      const uint32_t b0[2] = {r[0], r[1]}, b1[2] = {r[2], r[3]};
      function(chunk, b0);
      function(chunk + 1, b1);
    }
  }
};

}  // namespace attention
}  // namespace vllm_lite
