#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "attention/attention_work.h"
#include "attention/params.h"
#include "core/parallel_for.h"

namespace vllm_lite {
namespace {

// A range costs its reading and converting, about as much as the arithmetic of this many rows.
constexpr int64_t kRangeLoadRows = 8;
// Items are split by range until none is more than this part of the call.
constexpr int64_t kMinItems = 32;
// Less work than this (multiply-adds) is not worth waking a thread for.
constexpr int64_t kMinWorkerWork = 100'000;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t num_ranges(const AttentionItem& item) { return item.range_end - item.range_begin; }
int64_t cost(const AttentionItem& item) {
  return num_ranges(item) * (kRangeLoadRows + item.row_end - item.row_begin);
}

// Grows, never shrinks; 64-byte aligned; contents are not kept.
class Buffer {
 public:
  float* reserve(int64_t floats) {
    if (floats > size_) {
      data_.reset();
      size_ = 0;
      data_.reset(static_cast<float*>(
          ::operator new(static_cast<size_t>(floats) * sizeof(float), kAlignment)));
      size_ = floats;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

// Reused from call to call, so that a steady state allocates nothing.
struct Plan {
  std::vector<AttentionItem> whole;   // as cut by sequence, KV head and rows
  std::vector<AttentionItem> items;   // what runs first
  std::vector<AttentionItem> merges;  // then these
  Buffer partials;
};

void cut_into_items(const PagedAttentionParams& params, std::vector<AttentionItem>& items) {
  items.clear();
  const int32_t group = params.num_heads / params.num_kv_heads;
  for (int32_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const int64_t num_query = params.query_start[sequence + 1] - params.query_start[sequence];
    if (num_query <= 0) continue;
    const int64_t first_position = params.seq_lens[sequence] - num_query;
    const int64_t num_rows = num_query * group;
    const int64_t num_items = ceil_div(num_rows, kMaxItemRows);
    // Even parts, of whole register blocks.
    const int64_t item_rows =
        std::min<int64_t>(ceil_div(ceil_div(num_rows, num_items), 6) * 6, num_rows);
    for (int64_t begin = 0; begin < num_rows; begin += item_rows) {
      const int64_t end = std::min(num_rows, begin + item_rows);
      const int64_t seen_end = std::max<int64_t>(0, first_position + (end - 1) / group + 1);
      const int64_t seen_begin =
          params.sliding_window > 0
              ? std::max<int64_t>(0, first_position + begin / group + 1 - params.sliding_window)
              : 0;
      AttentionItem item{};
      item.sequence = sequence;
      item.row_begin = static_cast<int32_t>(begin);
      item.row_end = static_cast<int32_t>(end);
      item.range_begin = static_cast<int32_t>(seen_begin / kRangeTokens);
      item.range_end = static_cast<int32_t>(ceil_div(seen_end, kRangeTokens));
      item.partial = -1;
      for (item.kv_head = 0; item.kv_head < params.num_kv_heads; ++item.kv_head)
        items.push_back(item);
    }
  }
}

// Gives every range of the larger items an item of its own. What is split never changes a result.
void split_large_items(const PagedAttentionParams& params, Plan& plan, int64_t total_cost) {
  plan.items.clear();
  plan.merges.clear();
  int64_t partials_size = 0;
  for (AttentionItem item : plan.whole) {
    if (num_ranges(item) <= 1 || cost(item) * kMinItems <= total_cost) {
      plan.items.push_back(item);
      continue;
    }
    const int64_t range_floats = partial_floats(item.row_end - item.row_begin, params.head_size);
    item.partial = partials_size;
    plan.merges.push_back(item);
    for (int32_t range = item.range_begin; range < item.range_end; ++range) {
      AttentionItem part = item;
      part.range_begin = range;
      part.range_end = range + 1;
      part.partial = partials_size;
      plan.items.push_back(part);
      partials_size += range_floats;
    }
  }
  plan.partials.reserve(partials_size);
}

// Workers take the next item until none is left, so that unequal items balance.
template <typename Run>
void run_items(const std::vector<AttentionItem>& items, int64_t max_workers, const Run& run) {
  const int64_t count = static_cast<int64_t>(items.size());
  std::atomic<int64_t> next{0};
  parallel_for(std::min(count, max_workers), 1, [&](int64_t, int64_t) {
    for (;;) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      run(items[static_cast<size_t>(i)]);
    }
  });
}

void attend(const AttentionCall& call) { VL_DISPATCH_ISA(attend_item, call) }
void merge(const AttentionCall& call) { VL_DISPATCH_ISA(merge_item, call) }

}  // namespace

void paged_attention_cpu(const PagedAttentionParams& params) {
  static thread_local Plan plan_of_thread;
  Plan& plan = plan_of_thread;
  cut_into_items(params, plan.whole);
  int64_t total_cost = 0;
  for (const AttentionItem& item : plan.whole) total_cost += cost(item);
  split_large_items(params, plan, total_cost);
  const int64_t work = total_cost * kRangeTokens * 2 * params.head_size;
  const int64_t max_workers = std::max<int64_t>(1, work / kMinWorkerWork);
  float* const partials = plan.partials.reserve(0);
  const auto run = [&](void (*function)(const AttentionCall&), const AttentionItem& item) {
    static thread_local Buffer scratch;
    function(
        {&params, &item, partials, scratch.reserve(attention_scratch_floats(params.head_size))});
  };
  run_items(plan.items, max_workers, [&](const AttentionItem& item) { run(attend, item); });
  run_items(plan.merges, max_workers, [&](const AttentionItem& item) { run(merge, item); });
}

}  // namespace vllm_lite
