// One work item of paged attention (attention_work.h says how the work is cut).
//
// Both products run in register blocks (tile_math_isa.h). A few rows, as in decode, take keys and
// values straight from the cache; many rows share a float32 copy of the tile. Where pairs of
// bfloat16 are multiplied as they are (the weights are rounded then, and so summed), nothing is
// copied: a number of rows that changed the arithmetic would change bits. Keys of int8 are not,
// either: widened, they are little work. With AMX both products run in its tiles
// (tile_math_amx_isa.h).
//
// What a row must not see does not reach it: scores outside its span of the tile are replaced, not
// multiplied by 0, and the sum over values runs over the span only. So a slot that is unused, or
// that a later token has already been stored in, may hold a NaN.
#include "attention/attention_records_isa.h"
#include "attention/attention_work.h"
#include "attention/tile_math_isa.h"
#include "core/simd.h"
#if defined(VL_ISA_amx)
#include "attention/tile_math_amx_isa.h"
#endif

namespace vllm_lite::VL_ISA {
namespace {

// Up to so many rows a copy of the tile would cost more than widening its elements as they come.
constexpr int kFewRows = 8;

VL_SIMD int clamp_to_tile(int64_t offset) {
  return static_cast<int>(offset < 0 ? 0 : offset > kTileTokens ? kTileTokens : offset);
}

// ---- an item while it runs: its rows and its scratch

// T is the type of query and out, Stored that of the cache.
template <typename T, typename Stored = T>
class ItemRun {
 public:
  explicit ItemRun(const AttentionCall& call);
  void run();

 private:
  using Query = typename Keys<Stored>::Query;
  // Strips of which no row sees a token are the first of the cache, whose scores are not used.
  struct Tile {
    Strips<Stored> keys, values;
    int begin;  // tokens that some row sees
    int end;
  };
  // Positions that some row of an item sees.
  struct SeenSpan {
    int64_t begin, end;
  };
  // The tokens of a tile that each row sees.
  struct Spans {
    int begin[kMaxItemRows];
    int end[kMaxItemRows];
  };

  void load_query();
  void find_tile(const AttentionItem& item, SeenSpan seen, int64_t start, Tile& tile) const;
  // That at `start`, or if the item ends before, the first of the next item.
  void find_next_tile(int64_t start, Tile& tile) const;
  SeenSpan seen_by(const AttentionItem& item) const;
  // The rows' records of the range.
  void attend_range(int32_t range, float* records) const;
  void attend_tile(int64_t start, const Tile& tile, const Tile& next, float* records) const;
  template <typename U>
  void score_rows(const typename Keys<U>::Query* query, const Strips<U>& keys,
                  const Strips<char>& ahead, Fetch& fetch, int64_t start, const Tile& tile,
                  Spans& spans, float* records) const;
  template <typename U>
  void add_values(const Strips<U>& values, const Strips<char>& ahead, const Spans& spans,
                  float* records) const;
#if defined(VL_ISA_amx)
  void attend_tile_by_amx(int64_t start, const Tile& tile, const Tile& next, float* records) const;
  void add_values_by_amx(int row, int rows, const Tile& tile, const Spans& spans, Fetch& fetch,
                         float* records) const;
#endif
  float finish_scores(int row, int64_t start, int begin, int end) const;
  void softmax_rows(int first_row, int rows, int64_t start, const Tile& tile, const Spans& spans,
                    Fetch& fetch, float* records) const;

  int64_t seen_begin(int64_t position) const {
    const int64_t begin = position + 1 - params_.sliding_window;
    return params_.sliding_window == 0 || begin < 0 ? 0 : begin;
  }
  void find_span(int row, int64_t start, Spans& spans) const {
    spans.begin[row] = clamp_to_tile(seen_begin(rows_[row].position) - start);
    spans.end[row] = clamp_to_tile(int64_t{rows_[row].position} + 1 - start);
  }
  float* row_of(float* records, int row) const { return records + row * record_floats(head_size_); }

  const AttentionCall& call_;
  const PagedAttentionParams& params_;
  const AttentionItem& item_;
  const AttentionRow* const rows_;
  const int num_rows_;
  const int head_size_;
  const int row_elements_;      // of the cache
  const int num_words_;         // of a token's keys
  const int64_t value_offset_;  // from a strip's keys to its values
  const SeenSpan seen_;
  float factors_[kMaxItemRows];  // that make a row's products its scores
  Query* query_;                 // [rows, num_words * Keys<Stored>::kParts]
  float* keys_;                  // [kTileStrips] strips
  float* values_;                // [kTileTokens, head_size]
  float* scores_;                // [rows, kTileTokens], then weights
  float* range_total_;           // [rows] records
  float* total_;                 // [rows] records
};

template <typename T, typename Stored>
ItemRun<T, Stored>::ItemRun(const AttentionCall& call)
    : call_(call),
      params_(*call.params),
      item_(*call.item),
      rows_(call.rows + item_.row_begin),
      num_rows_(item_.row_end - item_.row_begin),
      head_size_(params_.head_size),
      row_elements_(head_size_ + (kHasScales<Stored> ? kKvScaleBytes : 0)),
      num_words_(head_size_ / kWordElements<Stored>),
      value_offset_(int64_t{params_.num_kv_heads} * params_.block_size * row_elements_),
      seen_(seen_by(item_)) {
  float* next = call.scratch;
  const auto take = [&next](int64_t floats) {
    float* taken = next;
    next += floats;
    return taken;
  };
  query_ = reinterpret_cast<Query*>(take(kMaxScratchRows * head_size_));
  keys_ = take(kTileTokens * head_size_);
  values_ = take(kTileTokens * head_size_);
  scores_ = take(kMaxScratchRows * kTileTokens);
  range_total_ = take(kMaxScratchRows * record_floats(head_size_));
  total_ = take(kMaxScratchRows * record_floats(head_size_));
}

template <typename T, typename Stored>
void ItemRun<T, Stored>::load_query() {
  const int row_numbers = num_words_ * Keys<Stored>::kParts;
  for (int r = 0; r < num_rows_; ++r) {
    const T* in = static_cast<const T*>(params_.query) +
                  rows_[r].token * params_.query_token_stride +
                  int64_t{first_head(call_) + rows_[r].head} * head_size_;
    factors_[r] =
        params_.scale * Keys<Stored>::load_query(in, head_size_, query_ + r * row_numbers);
  }
}

template <typename T, typename Stored>
auto ItemRun<T, Stored>::seen_by(const AttentionItem& item) const -> SeenSpan {
  SeenSpan seen{INT64_MAX, 0};
  for (int32_t i = item.row_begin; i < item.row_end; ++i) {
    const int64_t position = call_.rows[i].position, begin = seen_begin(position);
    if (begin < seen.begin) seen.begin = begin;
    if (position + 1 > seen.end) seen.end = position + 1;
  }
  const int64_t item_end = int64_t{item.ranges.end} * kRangeTokens;
  if (item_end < seen.end) seen.end = item_end;
  return seen;
}

template <typename T, typename Stored>
void ItemRun<T, Stored>::find_tile(const AttentionItem& item, SeenSpan seen, int64_t start,
                                   Tile& tile) const {
  tile.begin = clamp_to_tile(seen.begin - start);
  tile.end = clamp_to_tile(seen.end - start);
  const int32_t* table = params_.block_tables + item.table * params_.block_table_stride;
  for (int strip = 0; strip < kTileStrips; ++strip) {
    const auto* keys = static_cast<const Stored*>(params_.kv_cache);
    const int first = strip * kStripTokens;
    if (tile.begin < first + kStripTokens && first < tile.end) {
      const int64_t block = (start + first) / params_.block_size;
      const int64_t offset = (start + first) % params_.block_size;
      keys += 2 * table[block] * value_offset_ +
              (int64_t{item.kv_head} * params_.block_size + offset) * row_elements_;
    }
    tile.keys.at[strip] = keys;
    tile.values.at[strip] = keys + value_offset_;
  }
}

template <typename T, typename Stored>
void ItemRun<T, Stored>::find_next_tile(int64_t start, Tile& tile) const {
  if (start < seen_.end || call_.next_item == nullptr) {
    return find_tile(item_, seen_, start, tile);
  }
  const AttentionItem& item = *call_.next_item;
  const SeenSpan seen = seen_by(item);
  const int64_t begin = int64_t{item.ranges.begin} * kRangeTokens;
  find_tile(item, seen, begin > seen.begin ? begin : seen.begin / kTileTokens * kTileTokens, tile);
}

// Makes the products q·k of a row's tokens begin .. end-1 its scores, and of the others in their
// vectors -infinity. Returns the largest.
template <typename T, typename Stored>
float ItemRun<T, Stored>::finish_scores(int row, int64_t start, int begin, int end) const {
  float* scores = scores_ + row * kTileTokens;
  FloatVec highest = broadcast(-kInfinity);
  for (int t = begin / kWidth * kWidth; t < end; t += kWidth) {
    FloatVec x = mul(load(scores + t), broadcast(factors_[row]));
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

// The products of some rows become weights (times the values' scales, where they have some), and
// the records are rescaled to the new maxima. Step by step for all rows, without a branch on a
// maximum, so that the rows' latencies overlap.
template <typename T, typename Stored>
void ItemRun<T, Stored>::softmax_rows(int first_row, int rows, int64_t start, const Tile& tile,
                                      const Spans& spans, Fetch& fetch, float* records) const {
  const int fetch_groups = Fetch::groups_of_step(fetch, 2 * num_rows_);
  constexpr int kLanes = (kMaxBlockRows + kWidth - 1) / kWidth * kWidth;
  float shift[kLanes], keep[kLanes] = {};
  for (int i = 0; i < rows; ++i) {
    const int row = first_row + i;
    Fetch::groups(fetch, fetch_groups);
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
    Fetch::groups(fetch, fetch_groups);
    float* scores = scores_ + row * kTileTokens;
    FloatVec sum = zero();
    int first = spans.begin[row], last = spans.end[row];
#if defined(VL_ISA_amx)
    first = tile.begin, last = tile.end;  // whole strips, of all that some row sees
#endif
    for (int t = first / kWidth * kWidth; t < last; t += kWidth) {
#if defined(VL_ISA_amx)
      if (t + kWidth <= spans.begin[row] || t >= spans.end[row]) {
        __builtin_memset(reinterpret_cast<BFloat16*>(scores) + t, 0, kWidth * sizeof(BFloat16));
        continue;
      }
#endif
      const FloatVec score = sub(load(scores + t), broadcast(shift[i]));
#if defined(VL_ISA_avx512_bf16)
      if constexpr (kMeetPairs<Stored>) {
        auto* const rounded = reinterpret_cast<BFloat16*>(scores);
        sum = add(sum, store_rounded(rounded + t, weight_of_score(score)));
        continue;
      }
#endif
      const FloatVec weights = exp_of_negative(score);
      sum = add(sum, weights);
      if constexpr (kHasScales<Stored>) {
        const int strip = t / kStripTokens, lane = t - strip * kStripTokens;
        const Stored* behind = tile.values.at[strip] + kStripTokens * head_size_;
        store(scores + t, mul(weights, scales_behind(behind + lane * kKvScaleBytes)));
      } else {
        store(scores + t, weights);
      }
    }
    float* record = row_of(records, row);
    float& weight = weight_of(record, head_size_);
    weight = weight * keep[i] + reduce_add(sum);
    scale_values(record, head_size_, keep[i]);
  }
}

template <typename T, typename Stored>
template <typename U>
void ItemRun<T, Stored>::score_rows(const typename Keys<U>::Query* query, const Strips<U>& keys,
                                    const Strips<char>& ahead, Fetch& fetch, int64_t start,
                                    const Tile& tile, Spans& spans, float* records) const {
  const int num_words = head_size_ / kWordElements<U>;
  const int block = rows_of_block(num_rows_);
  for (int row = 0; row < num_rows_; row += block) {
    const int rows = min_int(block, num_rows_ - row);
    multiply_keys(rows, query + row * num_words * Keys<U>::kParts, num_words, keys, ahead,
                  tile.begin, tile.end, scores_ + row * kTileTokens);
    for (int r = row; r < row + rows; ++r) find_span(r, start, spans);
    softmax_rows(row, rows, start, tile, spans, fetch, records);
  }
}

// Each row over its own span: the common part of a block of rows together, what sticks out alone.
// Two tokens that a row sees and that make a pair are not parted.
template <typename T, typename Stored>
template <typename U>
void ItemRun<T, Stored>::add_values(const Strips<U>& values, const Strips<char>& ahead,
                                    const Spans& spans, float* records) const {
  const auto add = [&](int row, int rows, int begin, int end) {
    if (begin >= end) return;
    multiply_values(rows, scores_ + row * kTileTokens, begin, end, values, ahead, head_size_,
                    row_of(records, row));
  };
  const int block = rows_of_block(num_rows_);
  for (int row = 0; row < num_rows_; row += block) {
    const int row_end = min_int(row + block, num_rows_);
    int begin = 0, end = kTileTokens, first = kTileTokens, last = 0;
    for (int r = row; r < row_end; ++r) {
      begin = max_int(begin, spans.begin[r]);
      end = min_int(end, spans.end[r]);
      first = min_int(first, spans.begin[r]);
      last = max_int(last, spans.end[r]);
    }
    if (first < begin) begin += begin % 2;
    if (end < last) end -= end % 2;
    if (begin >= end) begin = end = kTileTokens;
    for (int r = row; r < row_end; ++r) {
      add(r, 1, spans.begin[r], min_int(begin, spans.end[r]));
    }
    add(row, row_end - row, begin, end);
    for (int r = row; r < row_end; ++r) add(r, 1, max_int(end, spans.begin[r]), spans.end[r]);
  }
}

#if defined(VL_ISA_amx)
// What some rows must not see, as a strip has it, is finite, and its weight 0; if it is not finite,
// each row is given a copy of its own. What no row of the block sees is copied as zeros.
template <typename T, typename Stored>
void ItemRun<T, Stored>::add_values_by_amx(int row, int rows, const Tile& tile, const Spans& spans,
                                           Fetch& fetch, float* records) const {
  const auto* const weights = reinterpret_cast<const BFloat16*>(scores_ + row * kTileTokens);
  auto* const copies = reinterpret_cast<BFloat16*>(values_);
  // Strips of which all see [begin, end), and some [first, last).
  Strips<Stored> shown = tile.values;
  const auto show = [&](int first, int begin, int end, int last) {
    bool is_finite = true;
    for (int strip = first / kStripTokens; strip * kStripTokens < last; ++strip) {
      const int token = strip * kStripTokens;
      shown.at[strip] = tile.values.at[strip];
      if (begin <= token && token + kStripTokens <= end) continue;
      BFloat16* const copy = copies + token * head_size_;
      is_finite &= copy_shown(tile.values.at[strip], first - token, last - token, head_size_, copy);
      shown.at[strip] = copy;
    }
    return is_finite;
  };
  const auto multiply = [&](int first, int last, float* to) {
    multiply_values(weights, first / kStripTokens, (last + kStripTokens - 1) / kStripTokens, shown,
                    head_size_, fetch, to);
  };
  int begin = 0, end = kTileTokens, first = kTileTokens, last = 0;
  for (int r = row; r < row + rows; ++r) {
    begin = max_int(begin, spans.begin[r]);
    end = min_int(end, spans.end[r]);
    if (spans.begin[r] >= spans.end[r]) continue;
    first = min_int(first, spans.begin[r]);
    last = max_int(last, spans.end[r]);
  }
  if (first >= last) return;
  if (show(first, begin, end, last)) return multiply(first, last, row_of(records, row));
  float* const of_block = keys_;
  for (int r = row; r < row + rows; ++r) {
    if (spans.begin[r] >= spans.end[r]) continue;
    show(spans.begin[r], spans.begin[r], spans.end[r], spans.end[r]);
    __builtin_memcpy(of_block, row_of(records, row),
                     sizeof(float) * kTileRows * record_floats(head_size_));
    multiply(spans.begin[r], spans.end[r], of_block);
    __builtin_memcpy(row_of(records, r), row_of(of_block, r - row), sizeof(float) * head_size_);
  }
}

// As attend_tile, a block of rows after the other; the first fetches the next tile.
template <typename T, typename Stored>
void ItemRun<T, Stored>::attend_tile_by_amx(int64_t start, const Tile& tile, const Tile& next,
                                            float* records) const {
  const Strips<char> keys = lines_of(next.keys), values = lines_of(next.values);
  const char* const softmax_strips[] = {keys.at[2], keys.at[3], values.at[0]};
  Fetch key_fetch{keys.at, 2, strip_bytes<Stored>(head_size_)};
  Fetch softmax_fetch{softmax_strips, 3, strip_bytes<Stored>(head_size_)};
  Fetch value_fetch{values.at + 1, 3, strip_bytes<Stored>(head_size_)};
  const int first = tile.begin / kStripTokens;
  const int last = (tile.end + kStripTokens - 1) / kStripTokens;
  const int block = rows_of_tiles(num_rows_);
  Spans spans;
  for (int row = 0; row < num_rows_; row += block) {
    const auto* query = reinterpret_cast<const BFloat16*>(query_) + row * head_size_;
    multiply_keys(query, head_size_, tile.keys, first, last, key_fetch,
                  scores_ + row * kTileTokens);
    const int rows = min_int(block, num_rows_ - row);
    for (int r = row; r < row + rows; ++r) find_span(r, start, spans);
    const int step = rows_of_block(rows);
    for (int r = row; r < row + rows; r += step) {
      softmax_rows(r, min_int(step, row + rows - r), start, tile, spans, softmax_fetch, records);
    }
    add_values_by_amx(row, rows, tile, spans, value_fetch, records);
  }
}
#endif

template <typename T, typename Stored>
void ItemRun<T, Stored>::attend_tile(int64_t start, const Tile& tile, const Tile& next,
                                     float* records) const {
  const bool is_few = num_rows_ <= kFewRows;
  // The next tile is fetched at an even pace, and each part of it early enough for memory to
  // deliver: keys 0 and 1 while this tile's keys are read, keys 2 and 3 and values 0 during the
  // softmax, values 1 to 3 while the values are read.
  const Strips<char> keys = lines_of(next.keys), values = lines_of(next.values);
  const Strips<char> later_values = {values.at[1], values.at[2], values.at[3], values.at[3]};
  const char* const softmax_strips[] = {keys.at[2], keys.at[3], values.at[0]};
  Fetch fetch{softmax_strips, 3, strip_bytes<Stored>(head_size_)};
  Spans spans;
  Strips<float> copy;
  if (!Keys<Stored>::kCopies || is_few) {
    score_rows(query_, tile.keys, keys, fetch, start, tile, spans, records);
  } else if constexpr (Keys<Stored>::kCopies) {
    for (int i = 0; i < kTileStrips; ++i) {
      float* to = keys_ + i * kStripTokens * head_size_;
      widen_keys(tile.keys.at[i], num_words_, keys.at[i], to);
      copy.at[i] = to;
    }
    score_rows(query_, copy, lines_of(copy), fetch, start, tile, spans, records);
  }
  if (is_few || kMeetPairs<Stored>) {
    add_values(tile.values, later_values, spans, records);
  } else {
    for (int i = 0; i < kTileStrips; ++i) {
      float* to = values_ + i * kStripTokens * head_size_;
      widen_values(tile.values.at[i], head_size_, later_values.at[i], to);
      copy.at[i] = to;
    }
    add_values(copy, lines_of(copy), spans, records);
  }
}

template <typename T, typename Stored>
void ItemRun<T, Stored>::attend_range(int32_t range, float* records) const {
  for (int r = 0; r < num_rows_; ++r) clear(row_of(records, r), head_size_);
  int64_t start = int64_t{range} * kRangeTokens;
  const int64_t range_end = start + kRangeTokens;
  const int64_t end = range_end < seen_.end ? range_end : seen_.end;
  Tile tiles[2];
  find_tile(item_, seen_, start, tiles[0]);
  for (int current = 0; start < end; start += kTileTokens, current ^= 1) {
    const Tile &tile = tiles[current], &next = tiles[current ^ 1];
    find_next_tile(start + kTileTokens, tiles[current ^ 1]);
    if (tile.begin >= tile.end) continue;
#if defined(VL_ISA_amx)
    attend_tile_by_amx(start, tile, next, records);
#else
    attend_tile(start, tile, next, records);
#endif
  }
}

template <typename T, typename Stored>
void ItemRun<T, Stored>::run() {
  load_query();
#if defined(VL_ISA_amx)
  const TileScope tiles(tiles_of_rows(rows_of_tiles(num_rows_)));
#endif
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

template <typename T>
void run_item(const AttentionCall& call) {
#if !defined(VL_ISA_amx)
  if (call.params->kv_dtype == KvDType::kInt8) return ItemRun<T, int8_t>(call).run();
#endif
  ItemRun<T>(call).run();
}

}  // namespace

void attend_item(const AttentionCall& call) {
#if !defined(VL_ISA_avx512_bf16)
  if (call.params->dtype == DType::kFloat32) return run_item<float>(call);
  if (call.params->dtype == DType::kFloat16) return run_item<Float16>(call);
#endif
  run_item<BFloat16>(call);
}

void merge_item(const AttentionCall& call) {
#if !defined(VL_ISA_avx512_bf16)
  if (call.params->dtype == DType::kFloat32) return merge_records<float>(call);
  if (call.params->dtype == DType::kFloat16) return merge_records<Float16>(call);
#endif
  merge_records<BFloat16>(call);
}

}  // namespace vllm_lite::VL_ISA
