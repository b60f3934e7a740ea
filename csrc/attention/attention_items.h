// Cuts a step's attention into the CPU's work items. How it is cut decides how long a step takes,
// and never changes a bit of a result: see kRangeTokens. Internal to attention/.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention_work.h"
#include "attention/params.h"

namespace vllm_lite {

// Used again for call after call, so that a steady state allocates nothing.
class AttentionItems {
 public:
  // REQUIRES: the indices of `params` are sound, where rows see them.
  void plan(const PagedAttentionParams& params);

  const std::vector<AttentionRow>& rows() const { return rows_; }
  // What runs first, larger items before smaller ones, and then what merges the records.
  const std::vector<AttentionItem>& items() const { return items_; }
  const std::vector<AttentionItem>& merges() const { return merges_; }
  int64_t num_records() const { return num_records_; }
  // All in all: multiply-adds, where reading the KV counts as its equivalent.
  int64_t work() const;

 private:
  struct Sequence {
    int32_t sequence;
    int32_t row_begin;  // in rows_
    int32_t row_end;
    int32_t whole_ranges;   // seen by all its rows from end to end
    int32_t common_ranges;  // of these, that are the same blocks as in the sequence before
  };
  // Rows that see the same blocks, and one KV head's part of the work stands for all.
  struct Cut {
    AttentionItem item;
    bool is_part;  // its rows have other cuts, too
  };

  const int32_t* table_of(const Sequence& sequence) const;
  int64_t whole_blocks(int32_t whole_ranges) const;
  int32_t common_ranges(const Sequence& a, const Sequence& b) const;
  void find_sequences();
  void add_rows();
  void cut(size_t begin, size_t end, int32_t first_range);
  void cut_rows(const Sequence& sequence, int32_t row_end, RangeSpan ranges, bool is_part);
  void add_items();
  void add_merges();

  const PagedAttentionParams* params_ = nullptr;
  std::vector<Sequence> sequences_;  // those that share blocks beside each other
  std::vector<AttentionRow> rows_;
  std::vector<Cut> cuts_;
  std::vector<AttentionItem> items_;
  std::vector<AttentionItem> merges_;
  int64_t total_cost_ = 0;
  int64_t num_records_ = 0;
};

}  // namespace vllm_lite
