// One work item of paged attention (attention_work.h says how the work is cut).
//
// Both products run in register blocks (tile_math_isa.h). A few rows, as in decode, take keys and
// values straight from the cache; many rows share a float32 copy of the tile. Where pairs of
// bfloat16 are multiplied as they are, keys are never copied: a number of rows that changed the
// arithmetic would change bits.
//
// What a row must not see does not reach it: scores outside its span of the tile are replaced, not
// multiplied by 0, and the sum over values runs over the span only. So a slot that is unused, or
// that a later token has already been stored in, may hold a NaN.
#include "attention/attention_work.h"
#include "attention/tile_math_isa.h"
#include "core/simd.h"

namespace vllm_lite::VL_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
// Up to so many rows a copy of the tile would cost more than widening its elements as they come.
constexpr int kFewRows = 8;

VL_SIMD int clamp_to_tile(int64_t offset) {
  return static_cast<int>(offset < 0 ? 0 : offset > kTileTokens ? kTileTokens : offset);
}

// ---- records (attention_work.h)

VL_SIMD float& maximum_of(float* record, int head_size) { return record[head_size]; }
VL_SIMD float& weight_of(float* record, int head_size) { return record[head_size + 1]; }

void clear(float* record, int head_size) {
  __builtin_memset(record, 0, sizeof(float) * head_size);
  maximum_of(record, head_size) = -kInfinity;
  weight_of(record, head_size) = 0;
}

// total = total * keep
VL_SIMD void scale_values(float* total, int head_size, float keep) {
  for (int d = 0; d < head_size; d += kWidth) {
    store(total + d, mul(load(total + d), broadcast(keep)));
  }
}

// The order of merges is the order of ranges. Exact where one of the two has seen nothing.
void merge(float* total, float* part, int head_size) {
  if (weight_of(part, head_size) == 0) return;
  if (weight_of(total, head_size) == 0) {
    __builtin_memcpy(total, part, sizeof(float) * record_floats(head_size));
    return;
  }
  const float old = maximum_of(total, head_size), other = maximum_of(part, head_size);
  const float maximum = old > other ? old : other;
  const float keep = exp(old - maximum), take = exp(other - maximum);
  scale_values(total, head_size, keep);
  for (int d = 0; d < head_size; d += kWidth) {
    store(total + d, fma(load(part + d), broadcast(take), load(total + d)));
  }
  maximum_of(total, head_size) = maximum;
  weight_of(total, head_size) =
      fma(weight_of(part, head_size), take, weight_of(total, head_size) * keep);
}

float* stored_record(const AttentionCall& call, const AttentionRow& row, int32_t range) {
  const int64_t index = row.record + int64_t{range - row.ranges.begin} * call.params->num_kv_heads +
                        call.item->kv_head;
  return call.records + index * record_floats(call.params->head_size);
}

int first_head(const AttentionCall& call) {
  return call.item->kv_head * (call.params->num_heads / call.params->num_kv_heads);
}

template <typename T>
void write_out(const AttentionCall& call, const AttentionRow& row, float* total) {
  const PagedAttentionParams& p = *call.params;
  T* out = static_cast<T*>(p.out) + row.token * p.out_token_stride +
           int64_t{first_head(call) + row.head} * p.head_size;
  const float weight = weight_of(total, p.head_size);
  const FloatVec factor = broadcast(weight == 0 ? 0.0f : 1.0f / weight);
  for (int d = 0; d < p.head_size; d += kWidth) store(out + d, mul(load(total + d), factor));
}

// ---- an item while it runs: its rows and its scratch

template <typename T>
class ItemRun {
 public:
  explicit ItemRun(const AttentionCall& call);
  void run();

 private:
  using Query = typename Keys<T>::Query;
  // Strips of which no row sees a token are the first of the cache, whose scores are not used.
  struct Tile {
    Strips<T> keys, values;
    int begin;  // tokens that some row sees
    int end;
  };
  // The tokens of a tile that each row sees.
  struct Spans {
    int begin[kMaxItemRows];
    int end[kMaxItemRows];
  };

  void load_query();
  void find_tile(int64_t start, Tile& tile) const;
  // The rows' records of the range.
  void attend_range(int32_t range, float* records) const;
  void attend_tile(int64_t start, const Tile& tile, const Tile& next, float* records) const;
  template <typename Stored>
  void score_rows(const typename Keys<Stored>::Query* query, const Strips<Stored>& keys,
                  const Strips<char>& ahead, Fetch& fetch, int64_t start, const Tile& tile,
                  Spans& spans, float* records) const;
  template <typename Stored>
  void add_values(const Strips<Stored>& values, const Strips<char>& ahead, const Spans& spans,
                  float* records) const;
  float finish_scores(int row, int64_t start, int begin, int end) const;
  void softmax_rows(int first_row, int rows, int64_t start, const Spans& spans, Fetch& fetch,
                    float* records) const;

  int64_t seen_begin(int64_t position) const {
    const int64_t begin = position + 1 - params_.sliding_window;
    return params_.sliding_window == 0 || begin < 0 ? 0 : begin;
  }
  float* row_of(float* records, int row) const { return records + row * record_floats(head_size_); }

  const AttentionCall& call_;
  const PagedAttentionParams& params_;
  const AttentionItem& item_;
  const AttentionRow* const rows_;
  const int num_rows_;
  const int head_size_;
  const int num_words_;         // of a token's keys
  const int64_t value_offset_;  // from a strip's keys to its values
  int64_t seen_begin_;          // by some row
  int64_t seen_end_;
  Query* query_;        // [rows, num_words * Keys<T>::kParts]
  float* keys_;         // [kTileStrips] strips
  float* values_;       // [kTileTokens, head_size]
  float* scores_;       // [rows, kTileTokens], then weights
  float* range_total_;  // [rows] records
  float* total_;        // [rows] records
};

template <typename T>
ItemRun<T>::ItemRun(const AttentionCall& call)
    : call_(call),
      params_(*call.params),
      item_(*call.item),
      rows_(call.rows + item_.row_begin),
      num_rows_(item_.row_end - item_.row_begin),
      head_size_(params_.head_size),
      num_words_(head_size_ / kWordElements<T>),
      value_offset_(int64_t{params_.num_kv_heads} * params_.block_size * head_size_),
      seen_begin_(seen_begin(rows_[0].position)),
      seen_end_(0) {
  for (int r = 0; r < num_rows_; ++r) {
    const int64_t end = int64_t{rows_[r].position} + 1;
    if (seen_begin(end - 1) < seen_begin_) seen_begin_ = seen_begin(end - 1);
    if (end > seen_end_) seen_end_ = end;
  }
  float* next = call.scratch;
  const auto take = [&next](int64_t floats) {
    float* taken = next;
    next += floats;
    return taken;
  };
  query_ = reinterpret_cast<Query*>(take(kMaxItemRows * head_size_));
  keys_ = take(kTileTokens * head_size_);
  values_ = take(kTileTokens * head_size_);
  scores_ = take(kMaxItemRows * kTileTokens);
  range_total_ = take(kMaxItemRows * record_floats(head_size_));
  total_ = take(kMaxItemRows * record_floats(head_size_));
}

template <typename T>
void ItemRun<T>::load_query() {
  const int row_numbers = num_words_ * Keys<T>::kParts;
  for (int r = 0; r < num_rows_; ++r) {
    const T* in = static_cast<const T*>(params_.query) +
                  rows_[r].token * params_.query_token_stride +
                  int64_t{first_head(call_) + rows_[r].head} * head_size_;
    Keys<T>::load_query(in, head_size_, query_ + r * row_numbers);
  }
}

template <typename T>
void ItemRun<T>::find_tile(int64_t start, Tile& tile) const {
  const bool in_item = start < int64_t{item_.ranges.end} * kRangeTokens;
  tile.begin = clamp_to_tile(seen_begin_ - start);
  tile.end = in_item ? clamp_to_tile(seen_end_ - start) : 0;
  const int32_t* table = params_.block_tables + item_.table * params_.block_table_stride;
  for (int strip = 0; strip < kTileStrips; ++strip) {
    const T* keys = static_cast<const T*>(params_.kv_cache);
    const int first = strip * kStripTokens;
    if (tile.begin < first + kStripTokens && first < tile.end) {
      const int64_t block = (start + first) / params_.block_size;
      const int64_t offset = (start + first) % params_.block_size;
      keys += 2 * table[block] * value_offset_ +
              (int64_t{item_.kv_head} * params_.block_size + offset) * head_size_;
    }
    tile.keys.at[strip] = keys;
    tile.values.at[strip] = keys + value_offset_;
  }
}

// Makes the products q·k of a row's tokens begin .. end-1 its scores, and of the others in their
// vectors -infinity. Returns the largest.
template <typename T>
float ItemRun<T>::finish_scores(int row, int64_t start, int begin, int end) const {
  float* scores = scores_ + row * kTileTokens;
  FloatVec highest = broadcast(-kInfinity);
  for (int t = begin / kWidth * kWidth; t < end; t += kWidth) {
    FloatVec x = mul(load(scores + t), broadcast(params_.scale));
    if (params_.alibi_slopes != nullptr) {
      const float slope = params_.alibi_slopes[first_head(call_) + rows_[row].head];
      const int32_t distance = static_cast<int32_t>(start + t - rows_[row].position);
      x = fma(broadcast(slope), from_int(lane_index() + distance), x);
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
  return reduce_max(highest);
}

// The products of some rows become weights, and the records are rescaled to the new maxima. Step by
// step for all rows, without a branch on a maximum, so that the rows' latencies overlap.
template <typename T>
void ItemRun<T>::softmax_rows(int first_row, int rows, int64_t start, const Spans& spans,
                              Fetch& fetch, float* records) const {
  const int fetch_lines = fetch.num_strips * fetch.strip_lines / (2 * num_rows_) + 1;
  constexpr int kLanes = (kMaxBlockRows + kWidth - 1) / kWidth * kWidth;
  float shift[kLanes], keep[kLanes] = {};
  for (int i = 0; i < rows; ++i) {
    const int row = first_row + i;
    Fetch::lines(fetch, fetch_lines);
    float& maximum = maximum_of(row_of(records, row), head_size_);
    const float old = maximum;
    const float highest = finish_scores(row, start, spans.begin[row], spans.end[row]);
    maximum = highest > old ? highest : old;
    // All scores so far may be -infinity, when their weights are 0, not NaN.
    shift[i] = maximum == -kInfinity ? 0.0f : maximum;
    keep[i] = old - shift[i];
  }
  for (int i = 0; i < rows; i += kWidth) store(keep + i, exp_of_negative(load(keep + i)));
  for (int i = 0; i < rows; ++i) {
    const int row = first_row + i;
    Fetch::lines(fetch, fetch_lines);
    float* scores = scores_ + row * kTileTokens;
    FloatVec sum = zero();
    for (int t = spans.begin[row] / kWidth * kWidth; t < spans.end[row]; t += kWidth) {
      const FloatVec weights = exp_of_negative(sub(load(scores + t), broadcast(shift[i])));
      store(scores + t, weights);
      sum = add(sum, weights);
    }
    float* record = row_of(records, row);
    float& weight = weight_of(record, head_size_);
    weight = weight * keep[i] + reduce_add(sum);
    scale_values(record, head_size_, keep[i]);
  }
}

template <typename T>
template <typename Stored>
void ItemRun<T>::score_rows(const typename Keys<Stored>::Query* query, const Strips<Stored>& keys,
                            const Strips<char>& ahead, Fetch& fetch, int64_t start,
                            const Tile& tile, Spans& spans, float* records) const {
  const int num_words = head_size_ / kWordElements<Stored>;
  const int block = rows_of_block(num_rows_);
  for (int row = 0; row < num_rows_; row += block) {
    const int rows = min_int(block, num_rows_ - row);
    multiply_keys(rows, query + row * num_words * Keys<Stored>::kParts, num_words, keys, ahead,
                  tile.begin, tile.end, scores_ + row * kTileTokens);
    for (int r = row; r < row + rows; ++r) {
      spans.begin[r] = clamp_to_tile(seen_begin(rows_[r].position) - start);
      spans.end[r] = clamp_to_tile(int64_t{rows_[r].position} + 1 - start);
    }
    softmax_rows(row, rows, start, spans, fetch, records);
  }
}

// Each row over its own span: the common part of a block of rows together, what sticks out alone.
template <typename T>
template <typename Stored>
void ItemRun<T>::add_values(const Strips<Stored>& values, const Strips<char>& ahead,
                            const Spans& spans, float* records) const {
  const auto add = [&](int row, int rows, int begin, int end) {
    if (begin >= end) return;
    multiply_values(rows, scores_ + row * kTileTokens, begin, end, values, ahead, head_size_,
                    row_of(records, row));
  };
  const int block = rows_of_block(num_rows_);
  for (int row = 0; row < num_rows_; row += block) {
    const int row_end = min_int(row + block, num_rows_);
    int begin = 0, end = kTileTokens;
    for (int r = row; r < row_end; ++r) {
      begin = max_int(begin, spans.begin[r]);
      end = min_int(end, spans.end[r]);
    }
    if (begin >= end) begin = end = kTileTokens;
    for (int r = row; r < row_end; ++r) {
      add(r, 1, spans.begin[r], min_int(begin, spans.end[r]));
    }
    add(row, row_end - row, begin, end);
    for (int r = row; r < row_end; ++r) add(r, 1, max_int(end, spans.begin[r]), spans.end[r]);
  }
}

template <typename T>
void ItemRun<T>::attend_tile(int64_t start, const Tile& tile, const Tile& next,
                             float* records) const {
  const bool is_few = num_rows_ <= kFewRows;
  // What is read next is fetched at an even pace: values 0 and 1 of this tile while its keys are
  // read, values 2 and 3 and the next tile's keys 0 during the softmax, keys 1 to 3 while the
  // values are read.
  const Strips<char> values = lines_of(tile.values), keys = lines_of(next.keys);
  const Strips<char> next_keys = {keys.at[1], keys.at[2], keys.at[3], keys.at[3]};
  const char* const softmax_strips[] = {values.at[2], values.at[3], keys.at[0]};
  Fetch fetch{softmax_strips, 3, num_words_};
  Spans spans;
  Strips<float> copy;
  if (Keys<T>::kParts == 1 || is_few) {
    score_rows(query_, tile.keys, values, fetch, start, tile, spans, records);
  } else if constexpr (Keys<T>::kParts > 1) {
    for (int i = 0; i < kTileStrips; ++i) {
      float* to = keys_ + i * kStripTokens * head_size_;
      widen_keys(tile.keys.at[i], num_words_, values.at[i], to);
      copy.at[i] = to;
    }
    score_rows(query_, copy, lines_of(copy), fetch, start, tile, spans, records);
  }
  if (is_few) {
    add_values(tile.values, next_keys, spans, records);
  } else {
    for (int i = 0; i < kTileStrips; ++i) {
      float* to = values_ + i * kStripTokens * head_size_;
      widen_values(tile.values.at[i], head_size_, next_keys.at[i], to);
      copy.at[i] = to;
    }
    add_values(copy, lines_of(copy), spans, records);
  }
}

template <typename T>
void ItemRun<T>::attend_range(int32_t range, float* records) const {
  for (int r = 0; r < num_rows_; ++r) clear(row_of(records, r), head_size_);
  int64_t start = int64_t{range} * kRangeTokens;
  const int64_t range_end = start + kRangeTokens;
  Tile tiles[2];
  find_tile(start, tiles[0]);
  for (int current = 0; start < range_end; start += kTileTokens, current ^= 1) {
    const Tile &tile = tiles[current], &next = tiles[current ^ 1];
    find_tile(start + kTileTokens, tiles[current ^ 1]);
    if (tile.begin < tile.end) attend_tile(start, tile, next, records);
  }
}

template <typename T>
void ItemRun<T>::run() {
  load_query();
  const RangeSpan ranges = item_.ranges;
  if (rows_[0].record >= 0) {
    for (int32_t range = ranges.begin; range < ranges.end; ++range) {
      attend_range(range, range_total_);
      for (int r = 0; r < num_rows_; ++r) {
        if (range < rows_[r].ranges.begin || range >= rows_[r].ranges.end) continue;
        __builtin_memcpy(stored_record(call_, rows_[r], range), row_of(range_total_, r),
                         sizeof(float) * record_floats(head_size_));
      }
    }
    return;
  }
  for (int r = 0; r < num_rows_; ++r) clear(row_of(total_, r), head_size_);
  for (int32_t range = ranges.begin; range < ranges.end; ++range) {
    // Into an empty total a merge is a copy.
    float* records = range == ranges.begin ? total_ : range_total_;
    attend_range(range, records);
    if (range == ranges.begin) continue;
    for (int r = 0; r < num_rows_; ++r) {
      merge(row_of(total_, r), row_of(range_total_, r), head_size_);
    }
  }
  for (int r = 0; r < num_rows_; ++r) write_out<T>(call_, rows_[r], row_of(total_, r));
}

template <typename T>
void merge_records(const AttentionCall& call) {
  float* total = call.scratch;
  for (int32_t i = call.item->row_begin; i < call.item->row_end; ++i) {
    const AttentionRow& row = call.rows[i];
    clear(total, call.params->head_size);
    for (int32_t range = row.ranges.begin; range < row.ranges.end; ++range) {
      merge(total, stored_record(call, row, range), call.params->head_size);
    }
    write_out<T>(call, row, total);
  }
}

}  // namespace

void attend_item(const AttentionCall& call) {
#if !defined(VL_ISA_avx512_bf16)
  if (call.params->dtype == DType::kFloat32) return ItemRun<float>(call).run();
  if (call.params->dtype == DType::kFloat16) return ItemRun<Float16>(call).run();
#endif
  ItemRun<BFloat16>(call).run();
}

void merge_item(const AttentionCall& call) {
#if !defined(VL_ISA_avx512_bf16)
  if (call.params->dtype == DType::kFloat32) return merge_records<float>(call);
  if (call.params->dtype == DType::kFloat16) return merge_records<Float16>(call);
#endif
  merge_records<BFloat16>(call);
}

}  // namespace vllm_lite::VL_ISA
