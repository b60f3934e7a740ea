#include "scheduler/plan_view.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/check.h"

namespace vllm_lite {
namespace {

// Hands out sections front to back and throws when there is not enough left.
class Sections {
 public:
  explicit Sections(std::span<const int32_t> words) : left_(words) {}
  std::span<const int32_t> take(int64_t count) {
    VL_ASSERT(count >= 0 && count <= static_cast<int64_t>(left_.size()));
    const auto section = left_.first(static_cast<size_t>(count));
    left_ = left_.subspan(static_cast<size_t>(count));
    return section;
  }
  bool empty() const { return left_.empty(); }

 private:
  std::span<const int32_t> left_;
};

}  // namespace

PlanView::PlanView(std::span<const int32_t> words) {
  Sections sections(words);
  const auto header_words = sections.take(sizeof(PlanHeader) / sizeof(int32_t));
  header_ = reinterpret_cast<const PlanHeader*>(header_words.data());
  const PlanHeader& h = *header_;
  VL_ASSERT(h.magic == kPlanMagic);
  VL_ASSERT(static_cast<size_t>(h.num_words) == words.size());
  slots_ = sections.take(2 * int64_t{h.num_tokens});
  token_ids_ = sections.take(h.num_tokens);
  positions_ = sections.take(h.num_tokens);
  query_start_ = sections.take(int64_t{h.num_seqs} + 1);
  seq_lens_ = sections.take(h.num_seqs);
  rows_ = sections.take(h.num_seqs);
  logits_indices_ = sections.take(h.num_logits);
  table_updates_ = sections.take(3 * int64_t{h.num_table_updates});
  copies_ = sections.take(2 * int64_t{h.num_block_copies});
  freed_rows_ = sections.take(h.num_freed_rows);
  new_rows_ = sections.take(int64_t{kNewRowWords} * h.num_new_rows);
  row_lists_ = sections.take(h.num_list_words);
  scored_ = sections.take(int64_t{kScoredWords} * h.num_scored);
  pooled_ = sections.take(int64_t{kPooledWords} * h.num_pooled);
  draft_rounds_ = sections.take(h.num_draft_rounds);
  VL_ASSERT(sections.empty());
  // Each round has some of the sequences of the one before.
  int64_t num_drafts = 0;
  int64_t most = int64_t{h.num_logits} - h.num_drafts;
  for (const int32_t size : draft_rounds_) {
    VL_ASSERT(size >= 1 && size <= most);
    num_drafts += most = size;
  }
  VL_ASSERT(num_drafts == h.num_drafts);
  new_rows();  // throws if the lists are not as long as the rows say
}

int64_t PlanView::slot(int32_t token) const {
  int64_t slot = 0;
  std::memcpy(&slot, slots_.subspan(2 * static_cast<size_t>(token), 2).data(), sizeof(slot));
  return slot;
}

TableUpdate PlanView::table_update(int32_t index) const {
  const auto words = table_updates_.subspan(3 * static_cast<size_t>(index), 3);
  return {.row = words[0], .index = words[1], .block = words[2]};
}

std::vector<NewRow> PlanView::new_rows() const {
  std::vector<NewRow> rows;
  Sections records(new_rows_), lists(row_lists_);
  while (!records.empty()) {
    NewRow& row = rows.emplace_back();
    row.row = records.take(1)[0];
    RowState state;
    std::memcpy(static_cast<void*>(&state), records.take(kRowStateWords).data(), sizeof(state));
    row.sampling.row = state.sampling;
    const auto take_ids = [&lists](int32_t count) {
      const auto ids = lists.take(count);
      return std::vector<TokenId>(ids.begin(), ids.end());
    };
    row.sampling.bias_ids = take_ids(state.num_bias);
    for (int32_t bits : lists.take(state.num_bias)) {
      row.sampling.bias_values.push_back(std::bit_cast<float>(bits));
    }
    row.sampling.allowed_ids = take_ids(state.num_allowed);
    row.sampling.stop_ids = take_ids(state.num_stop);
    row.history = take_ids(state.num_history);
  }
  while (!lists.empty()) {
    RowConstraint head;
    std::memcpy(&head, lists.take(kRowConstraintWords).data(), sizeof(head));
    const auto row = std::find_if(rows.begin(), rows.end(), [&head](const NewRow& candidate) {
      return candidate.row == head.row;
    });
    VL_ASSERT(row != rows.end() && head.num_bytes > 0);
    const auto bytes =
        lists.take(static_cast<int64_t>(constraint_words(static_cast<size_t>(head.num_bytes))));
    row->sampling.constraint.assign(reinterpret_cast<const char*>(bytes.data()),
                                    static_cast<size_t>(head.num_bytes));
    const auto output = lists.take(head.num_output);
    row->output.assign(output.begin(), output.end());
  }
  return rows;
}

std::vector<ScoredToken> PlanView::scored() const {
  std::vector<ScoredToken> tokens;
  for (Sections records(scored_); !records.empty();) {
    const auto words = records.take(kScoredWords);
    tokens.push_back({.index = words[0], .token = words[1], .count = words[2]});
  }
  return tokens;
}

std::vector<PooledPart> PlanView::pooled() const {
  std::vector<PooledPart> parts;
  for (Sections records(pooled_); !records.empty();) {
    const auto words = records.take(kPooledWords);
    parts.push_back(
        {.sequence = words[0], .pooling = static_cast<Pooling>(words[1]), .ends = words[2] != 0});
  }
  return parts;
}

}  // namespace vllm_lite
