#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "attention/attention_items.h"
#include "attention/attention_work.h"
#include "attention/params.h"
#include "core/check.h"
#include "core/kv_layout_cpu.h"
#include "core/parallel_for.h"

namespace vllm_lite {
namespace {

// Less work than this (multiply-adds) is not worth waking a thread for.
constexpr int64_t kMinWorkerWork = 100'000;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

// Whether all ids are in [0, num_blocks). Without a branch, so that it is done in vectors.
bool are_blocks(const int32_t* ids, int64_t count, int64_t num_blocks) {
  const uint32_t bound = static_cast<uint32_t>(std::min<int64_t>(num_blocks, INT64_C(1) << 31));
  uint32_t outside = 0;
  for (int64_t i = 0; i < count; ++i) outside |= static_cast<uint32_t>(ids[i]) >= bound;
  return outside == 0;
}

// What the kernel would follow out of its tensors. Serial: a table costs a thousandth of its KV.
void check_indices(const PagedAttentionParams& params) {
  const auto entry = [](const char* name, int64_t index, int64_t value) {
    return std::string(name) + "[" + std::to_string(index) + "] is " + std::to_string(value);
  };
  for (int32_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const int64_t begin = params.query_start[sequence], end = params.query_start[sequence + 1];
    VL_CHECK(0 <= begin && begin <= end && end <= params.num_tokens,
             entry("paged_attention: query_start", sequence, begin) + " and " +
                 entry("query_start", sequence + 1, end) + "; they must ascend from 0 to " +
                 std::to_string(params.num_tokens) + ", the tokens of query");
    if (begin == end) continue;
    const int64_t row = params.rows[sequence], length = params.seq_lens[sequence];
    VL_CHECK(0 <= row && row < params.max_rows, entry("paged_attention: rows", sequence, row) +
                                                    "; block_tables has rows 0 to " +
                                                    std::to_string(params.max_rows - 1));
    VL_CHECK(length <= params.block_table_stride * params.block_size,
             entry("paged_attention: seq_lens", sequence, length) + "; row " + std::to_string(row) +
                 " of block_tables holds " + std::to_string(params.block_table_stride) +
                 " blocks of " + std::to_string(params.block_size) + " tokens");
    const int64_t first =
        first_seen(length - (end - begin), params.sliding_window) / params.block_size;
    const int64_t count = ceil_div(std::max<int64_t>(0, length), params.block_size) - first;
    const int32_t* ids = params.block_tables + row * params.block_table_stride + first;
    if (are_blocks(ids, count, params.num_blocks)) continue;
    int64_t bad = 0;
    while (are_blocks(ids + bad, 1, params.num_blocks)) ++bad;
    throw Error("paged_attention: row " + std::to_string(row) +
                " of block_tables: " + entry("block", first + bad, ids[bad]) +
                "; the cache has blocks 0 to " + std::to_string(params.num_blocks - 1));
  }
}

// Workers take the next items until none is left, so that unequal items balance: `step` at a time
// where there are many. run(item, next) is also told what the worker will take after it if all go
// on in turn.
template <typename Run>
void run_items(const std::vector<AttentionItem>& items, int64_t step, int64_t max_workers,
               const Run& run) {
  constexpr int64_t kMany = 64;
  const int64_t count = static_cast<int64_t>(items.size());
  if (count < kMany * step) step = 1;
  std::atomic<int64_t> taken{0}, num_workers{0};
  parallel_for(std::min(ceil_div(count, step), max_workers), 1, [&](int64_t, int64_t) {
    num_workers.fetch_add(1, std::memory_order_relaxed);
    for (;;) {
      const int64_t first = taken.fetch_add(step, std::memory_order_relaxed);
      if (first >= count) return;
      const int64_t end = std::min(first + step, count);
      for (int64_t i = first; i < end; ++i) {
        const int64_t others = (num_workers.load(std::memory_order_relaxed) - 1) * step;
        const int64_t next = i + 1 < end ? i + 1 : i + 1 + others;
        run(items[static_cast<size_t>(i)],
            next < count ? &items[static_cast<size_t>(next)] : nullptr);
      }
    }
  });
}

bool use_amx(const AttentionCall& call) {
  return current_isa() == Isa::kAmx && call.params->dtype == DType::kBFloat16 &&
         call.params->kv_dtype == KvDType::kAsQuery;
}
bool use_bf16_pairs(const AttentionCall& call) {
  return current_isa() >= Isa::kAvx512Bf16 && call.params->dtype == DType::kBFloat16;
}
void attend(const AttentionCall& call) {
  if (use_amx(call)) return amx::attend_item(call);
  if (use_bf16_pairs(call)) return avx512_bf16::attend_item(call);
  VL_DISPATCH_ISA(attend_item, call)
}
void merge(const AttentionCall& call) {
  if (use_amx(call)) return amx::merge_item(call);
  if (use_bf16_pairs(call)) return avx512_bf16::merge_item(call);
  VL_DISPATCH_ISA(merge_item, call)
}

}  // namespace

static_assert(is_block_size(kStripTokens));  // so that a block of any size has whole strips

void paged_attention_cpu(const PagedAttentionParams& params) {
  VL_CHECK(params.kv_dtype != KvDType::kFloat8E4M3,
           "paged_attention: an FP8 kv_cache has no CPU kernel");
  VL_CHECK(is_block_size(params.block_size), "paged_attention: block_size is " +
                                                 std::to_string(params.block_size) +
                                                 "; it must be a power of two from 16 to 256");
  check_indices(params);
  // Reused from call to call, so that a steady state allocates nothing.
  static thread_local AttentionItems plan_of_thread;
  static thread_local Buffer records_of_thread;
  AttentionItems& plan = plan_of_thread;
  plan.plan(params);
  float* const records =
      records_of_thread.reserve(plan.num_records() * record_floats(params.head_size));
  const int64_t max_workers = std::max<int64_t>(1, plan.work() / kMinWorkerWork);
  const auto run_all = [&](const std::vector<AttentionItem>& items,
                           void (*function)(const AttentionCall&)) {
    run_items(items, params.num_kv_heads, max_workers,
              [&](const AttentionItem& item, const AttentionItem* next) {
                static thread_local Buffer scratch;
                function({&params, plan.rows().data(), &item, next, records,
                          scratch.reserve(attention_scratch_floats(params.head_size))});
              });
  };
  run_all(plan.items(), attend);
  run_all(plan.merges(), merge);
}

}  // namespace vllm_lite
