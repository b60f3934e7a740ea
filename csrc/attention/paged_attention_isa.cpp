// One work item of paged attention (attention_work.h says how the work is cut).
//
// Both products run in one register-blocked routine, C[rows, n] += A[rows, k] * B[k, n], which adds
// the k terms of an element one after the other. Its B are float32 copies of the tile made once for
// all rows: K transposed, [head_size][kTileTokens], so that scores need no sum across lanes, and V.
// bf16 and fp16 keys are transposed as pairs of elements, which halves the shuffles.
//
// What a row must not see it never touches: scores outside its span of the tile are replaced, not
// multiplied by 0, and the sum over values runs over the span only. So a NaN in an unused slot, or
// a later token that happens to be stored already, cannot reach it.
#include "attention/attention_work.h"
#include "attention/tile_math_isa.h"
#include "core/simd.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
alignas(64) constexpr float kZeroRow[kMaxHeadSize] = {};

VL_SIMD int min_int(int a, int b) { return a < b ? a : b; }
VL_SIMD int max_int(int a, int b) { return a > b ? a : b; }
VL_SIMD int clamp_to_tile(int64_t offset) {
  return static_cast<int>(offset < 0 ? 0 : offset > kTileTokens ? kTileTokens : offset);
}

// Softmax state of the item's rows over some part of the KV: sum of weights * V, the largest score,
// sum of weights. A weight is exp(score - maximum); a row that has seen nothing has weight 0.
struct Sums {
  float* values;  // [rows, head_size]
  float* maxima;  // [rows]
  float* weights;
};

void clear(const Sums& sums, int num_rows, int head_size) {
  __builtin_memset(sums.values, 0, sizeof(float) * num_rows * head_size);
  for (int r = 0; r < num_rows; ++r) {
    sums.maxima[r] = -kInfinity;
    sums.weights[r] = 0;
  }
}

// The order of merges is the order of ranges. Exact where one of the two has seen nothing.
void merge(const Sums& total, const Sums& part, int num_rows, int head_size) {
  for (int r = 0; r < num_rows; ++r) {
    if (part.weights[r] == 0) continue;
    float* out = total.values + static_cast<int64_t>(r) * head_size;
    const float* in = part.values + static_cast<int64_t>(r) * head_size;
    if (total.weights[r] == 0) {
      __builtin_memcpy(out, in, sizeof(float) * head_size);
      total.maxima[r] = part.maxima[r];
      total.weights[r] = part.weights[r];
      continue;
    }
    const float old_maximum = total.maxima[r];
    const float maximum = old_maximum > part.maxima[r] ? old_maximum : part.maxima[r];
    const float keep = exp(old_maximum - maximum), take = exp(part.maxima[r] - maximum);
    for (int d = 0; d < head_size; d += kWidth) {
      store(out + d, fma(load(in + d), broadcast(take), mul(load(out + d), broadcast(keep))));
    }
    total.maxima[r] = maximum;
    total.weights[r] = fma(part.weights[r], take, total.weights[r] * keep);
  }
}

// An item while it runs: where its rows stand, and its scratch.
template <typename T>
class ItemRun {
 public:
  explicit ItemRun(const AttentionCall& call);
  void load_query() const;
  // Continues `sums` over the tiles of one range.
  void attend_range(int32_t range, const Sums& sums) const;
  void write_out(const Sums& total) const;
  // Where the range's result goes when the item is split.
  Sums partial_sums(int32_t range) const;
  Sums range_sums() const { return range_sums_; }
  Sums total_sums() const { return total_sums_; }
  int num_rows() const { return num_rows_; }

 private:
  // The tokens of a tile that some row sees. Block tables scatter them, so that the processor's own
  // prefetcher starts anew at every block: while the keys are read, the values are fetched, and
  // while the values are read, the next tile's keys.
  struct Tile {
    const T* keys[kTileTokens];  // the value row is value_offset_ further; zeros for other tokens
    int begin;
    int end;
  };
  // The tokens of a tile that each row sees.
  struct Spans {
    int begin[kMaxItemRows];
    int end[kMaxItemRows];
  };
  int64_t seen_begin(int row) const {
    const int64_t begin = positions_[row] + 1 - params_.sliding_window;
    return params_.sliding_window == 0 || begin < 0 ? 0 : begin;
  }
  int64_t seen_end(int row) const { return positions_[row] + 1; }
  // A single block of rows uses each value once; converting it ahead would only move it twice.
  bool values_in_place() const { return num_rows_ <= kBlockRows; }
  void find_tile(int64_t start, Tile& tile) const;
  void load_tile(const Tile& tile, const Tile& next) const;
  void softmax_row(int row, int64_t start, int begin, int end, const Sums& sums) const;
  void add_values(int first_row, int rows, const Tile& tile, const Tile& next, const Spans& spans,
                  float* sums) const;

  const PagedAttentionParams& params_;
  const AttentionItem& item_;
  const int head_size_;
  const int group_;
  const int num_rows_;
  int64_t positions_[kMaxItemRows];
  int64_t first_token_;   // of the sequence, in query and out
  int64_t value_offset_;  // from a token's key to its value
  float* partials_;
  float* query_;   // [rows, head_size], scaled
  float* keys_;    // [head_size, kTileTokens]
  float* values_;  // [kTileTokens, head_size]
  float* scores_;  // [rows, kTileTokens], then weights
  Sums range_sums_;
  Sums total_sums_;
};

template <typename T>
ItemRun<T>::ItemRun(const AttentionCall& call)
    : params_(*call.params),
      item_(*call.item),
      head_size_(params_.head_size),
      group_(params_.num_heads / params_.num_kv_heads),
      num_rows_(item_.row_end - item_.row_begin),
      partials_(call.partials) {
  first_token_ = params_.query_start[item_.sequence];
  const int64_t num_query = params_.query_start[item_.sequence + 1] - first_token_;
  const int64_t first_position = params_.seq_lens[item_.sequence] - num_query;
  for (int r = 0; r < num_rows_; ++r) {
    positions_[r] = first_position + (item_.row_begin + r) / group_;
  }
  value_offset_ = static_cast<int64_t>(params_.num_kv_heads) * params_.block_size * head_size_;
  float* next = call.scratch;
  const auto take = [&next](int64_t floats) {
    float* taken = next;
    next += floats;
    return taken;
  };
  query_ = take(kMaxItemRows * head_size_);
  keys_ = take(kTileTokens * head_size_);
  values_ = take(kTileTokens * head_size_);
  scores_ = take(kMaxItemRows * kTileTokens);
  range_sums_ = {take(kMaxItemRows * head_size_), take(kMaxItemRows), take(kMaxItemRows)};
  total_sums_ = {take(kMaxItemRows * head_size_), take(kMaxItemRows), take(kMaxItemRows)};
}

template <typename T>
Sums ItemRun<T>::partial_sums(int32_t range) const {
  float* values = partials_ + item_.partial +
                  (range - item_.range_begin) * partial_floats(num_rows_, head_size_);
  float* maxima = values + static_cast<int64_t>(num_rows_) * head_size_;
  return {values, maxima, maxima + num_rows_};
}

template <typename T>
void ItemRun<T>::load_query() const {
  for (int r = 0; r < num_rows_; ++r) {
    const int row = item_.row_begin + r;
    const T* in = static_cast<const T*>(params_.query) +
                  (first_token_ + row / group_) * params_.query_token_stride +
                  static_cast<int64_t>(item_.kv_head * group_ + row % group_) * head_size_;
    for (int d = 0; d < head_size_; d += kWidth) {
      store(query_ + r * head_size_ + d, mul(load(in + d), broadcast(params_.scale)));
    }
  }
}

template <typename T>
void ItemRun<T>::find_tile(int64_t start, Tile& tile) const {
  const bool in_item = start < static_cast<int64_t>(item_.range_end) * kRangeTokens;
  tile.begin = clamp_to_tile(seen_begin(0) - start);
  tile.end = in_item ? clamp_to_tile(seen_end(num_rows_ - 1) - start) : 0;
  const int32_t* table =
      params_.block_tables + params_.rows[item_.sequence] * params_.block_table_stride;
  const T* cache = static_cast<const T*>(params_.kv_cache);
  // The vectors at the ends of the span may reach beyond it; those tokens' slots may hold anything.
  const T* zeros = reinterpret_cast<const T*>(kZeroRow);
  for (int t = 0; t < tile.begin; ++t) tile.keys[t] = zeros;
  for (int t = tile.begin; t < tile.end;) {
    const int64_t block = (start + t) / params_.block_size;
    const int32_t offset = static_cast<int32_t>((start + t) % params_.block_size);
    const T* key = cache + 2 * table[block] * value_offset_ +
                   (static_cast<int64_t>(item_.kv_head) * params_.block_size + offset) * head_size_;
    const int run_end = min_int(tile.end, t + params_.block_size - offset);
    for (; t < run_end; ++t, key += head_size_) tile.keys[t] = key;
  }
  for (int t = tile.end; t < kTileTokens; ++t) tile.keys[t] = zeros;
}

template <typename T>
void ItemRun<T>::load_tile(const Tile& tile, const Tile& next) const {
  const int head_size = head_size_, row_bytes = head_size * static_cast<int>(sizeof(T));
  for (int t = tile.begin / kWidth * kWidth; t < tile.end; t += kWidth) {
    const int group_end = min_int(t + kWidth, tile.end);
    for (int i = max_int(t, tile.begin); i < group_end; ++i) {
      prefetch(tile.keys[i] + value_offset_, row_bytes);
    }
    load_keys(tile.keys + t, head_size, keys_ + t);
  }
  if (values_in_place()) return;
  for (int t = tile.begin; t < tile.end; ++t) {
    prefetch(next.keys[t], row_bytes);
    const T* in = tile.keys[t] + value_offset_;
    float* out = values_ + t * head_size;
    for (int d = 0; d < head_size; d += kWidth) store(out + d, load(in + d));
  }
}

// Scores of tokens begin..end-1 of the tile become weights; `sums` is rescaled to the new maximum.
template <typename T>
void ItemRun<T>::softmax_row(int row, int64_t start, int begin, int end, const Sums& sums) const {
  float* scores = scores_ + row * kTileTokens;
  const int first = begin / kWidth * kWidth;
  FloatVec highest = broadcast(-kInfinity);
  for (int t = first; t < end; t += kWidth) {
    FloatVec x = load(scores + t);
    if (params_.alibi_slopes != nullptr) {
      const int head = item_.kv_head * group_ + (item_.row_begin + row) % group_;
      const int32_t distance = static_cast<int32_t>(start + t - positions_[row]);
      x = fma(broadcast(params_.alibi_slopes[head]), from_int(lane_index() + distance), x);
    }
    if (params_.soft_cap > 0) {
      const FloatVec cap = broadcast(params_.soft_cap);
      x = mul(cap, tanh(div(x, cap)));
    }
    if (t < begin || t + kWidth > end) {
      const IntLanes token = lane_index() + t;
      x = select((token >= begin) & (token < end), x, broadcast(-kInfinity));
    }
    store(scores + t, x);
    highest = max(highest, x);
  }
  const float old_maximum = sums.maxima[row], tile_maximum = reduce_max(highest);
  const float maximum = tile_maximum > old_maximum ? tile_maximum : old_maximum;
  // All scores so far may be -infinity, when their weights are 0, not NaN.
  const FloatVec shift = broadcast(maximum == -kInfinity ? 0.0f : maximum);
  FloatVec weight = zero();
  for (int t = first; t < end; t += kWidth) {
    const FloatVec w = exp(sub(load(scores + t), shift));
    store(scores + t, w);
    weight = add(weight, w);
  }
  float old_weight = sums.weights[row];
  if (old_weight != 0 && maximum != old_maximum) {
    const float keep = exp(old_maximum - maximum);
    old_weight *= keep;
    float* values = sums.values + static_cast<int64_t>(row) * head_size_;
    for (int d = 0; d < head_size_; d += kWidth) {
      store(values + d, mul(load(values + d), broadcast(keep)));
    }
  }
  sums.maxima[row] = maximum;
  sums.weights[row] = old_weight + reduce_add(weight);
}

// sums += weights * V, each row over its own span: the common part together, what sticks out alone.
template <typename T>
void ItemRun<T>::add_values(int first_row, int rows, const Tile& tile, const Tile& next,
                            const Spans& spans, float* sums) const {
  const auto add = [&](int row, int count, int begin, int end) {
    if (begin >= end) return;
    const float* weights = scores_ + row * kTileTokens + begin;
    const int vecs = head_size_ / kWidth;
    float* out = sums + row * head_size_;
    if (values_in_place()) {
      multiply<true>(count, weights, kTileTokens,
                     CacheRows<T>{tile.keys + begin, next.keys + begin, value_offset_}, out,
                     head_size_, end - begin, vecs);
    } else {
      multiply<true>(count, weights, kTileTokens,
                     TileRows{values_ + begin * head_size_, head_size_}, out, head_size_,
                     end - begin, vecs);
    }
  };
  int begin = 0, end = kTileTokens;
  for (int r = first_row; r < first_row + rows; ++r) {
    begin = max_int(begin, spans.begin[r]);
    end = min_int(end, spans.end[r]);
  }
  if (begin >= end) begin = end = kTileTokens;
  for (int r = first_row; r < first_row + rows; ++r) {
    add(r, 1, spans.begin[r], min_int(begin, spans.end[r]));
  }
  add(first_row, rows, begin, end);
  for (int r = first_row; r < first_row + rows; ++r) {
    add(r, 1, max_int(end, spans.begin[r]), spans.end[r]);
  }
}

template <typename T>
void ItemRun<T>::attend_range(int32_t range, const Sums& sums) const {
  clear(sums, num_rows_, head_size_);
  int64_t start = static_cast<int64_t>(range) * kRangeTokens;
  const int64_t range_end = start + kRangeTokens;
  Tile tiles[2];
  find_tile(start, tiles[0]);
  for (int current = 0; start < range_end; start += kTileTokens, current ^= 1) {
    const Tile &tile = tiles[current], &next = tiles[current ^ 1];
    find_tile(start + kTileTokens, tiles[current ^ 1]);
    if (tile.begin >= tile.end) continue;
    load_tile(tile, next);
    const int first = tile.begin / kWidth, vecs = (tile.end + kWidth - 1) / kWidth - first;
    Spans spans;
    for (int row = 0; row < num_rows_; row += kBlockRows) {
      const int rows = min_int(kBlockRows, num_rows_ - row);
      multiply<false>(rows, query_ + row * head_size_, head_size_,
                      TileRows{keys_ + first * kWidth, kTileTokens},
                      scores_ + row * kTileTokens + first * kWidth, kTileTokens, head_size_, vecs);
      for (int r = row; r < row + rows; ++r) {
        spans.begin[r] = clamp_to_tile(seen_begin(r) - start);
        spans.end[r] = clamp_to_tile(seen_end(r) - start);
        if (spans.begin[r] < spans.end[r]) {
          softmax_row(r, start, spans.begin[r], spans.end[r], sums);
        }
      }
    }
    for (int row = 0; row < num_rows_; row += kBlockRows) {
      add_values(row, min_int(kBlockRows, num_rows_ - row), tile, next, spans, sums.values);
    }
  }
}

template <typename T>
void ItemRun<T>::write_out(const Sums& total) const {
  for (int r = 0; r < num_rows_; ++r) {
    const int row = item_.row_begin + r;
    T* out = static_cast<T*>(params_.out) +
             (first_token_ + row / group_) * params_.out_token_stride +
             static_cast<int64_t>(item_.kv_head * group_ + row % group_) * head_size_;
    const float weight = total.weights[r];
    const FloatVec factor = broadcast(weight == 0 ? 0.0f : 1.0f / weight);
    for (int d = 0; d < head_size_; d += kWidth) {
      store(out + d, mul(load(total.values + r * head_size_ + d), factor));
    }
  }
}

template <typename T>
void attend(const AttentionCall& call) {
  const ItemRun<T> run(call);
  const AttentionItem& item = *call.item;
  run.load_query();
  if (item.partial >= 0) {
    run.attend_range(item.range_begin, run.partial_sums(item.range_begin));
    return;
  }
  const Sums total = run.total_sums();
  clear(total, run.num_rows(), call.params->head_size);
  for (int32_t range = item.range_begin; range < item.range_end; ++range) {
    // Into an empty total a merge is a copy.
    const Sums sums = range == item.range_begin ? total : run.range_sums();
    run.attend_range(range, sums);
    if (range != item.range_begin) merge(total, sums, run.num_rows(), call.params->head_size);
  }
  run.write_out(total);
}

template <typename T>
void merge_ranges(const AttentionCall& call) {
  const ItemRun<T> run(call);
  const Sums total = run.total_sums();
  clear(total, run.num_rows(), call.params->head_size);
  for (int32_t range = call.item->range_begin; range < call.item->range_end; ++range) {
    merge(total, run.partial_sums(range), run.num_rows(), call.params->head_size);
  }
  run.write_out(total);
}

}  // namespace

void attend_item(const AttentionCall& call) {
  switch (call.params->dtype) {
    case DType::kFloat32:
      return attend<float>(call);
    case DType::kBFloat16:
      return attend<BFloat16>(call);
    case DType::kFloat16:
      return attend<Float16>(call);
    case DType::kFloat8E4M3:  // bindings/ refuses it
      break;
  }
}

void merge_item(const AttentionCall& call) {
  switch (call.params->dtype) {
    case DType::kFloat32:
      return merge_ranges<float>(call);
    case DType::kBFloat16:
      return merge_ranges<BFloat16>(call);
    case DType::kFloat16:
      return merge_ranges<Float16>(call);
    case DType::kFloat8E4M3:  // bindings/ refuses it
      break;
  }
}

}  // namespace vllm_lite::VL_ISA
