// A worker in place of the real one: it knows plans alone, and keeps as "KV" what was stored where.
//
// A slot holds (token, position). forward() applies a plan's words in the worker's order - freed
// rows, new rows, table updates, copies, stores, queries - and asserts that every position a query
// sees holds exactly what its sequence has there. It samples from what it read, so a wrong block
// that happened to pass would still change the output.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "scheduler/plan_view.h"
#include "scheduler/scheduler.h"

namespace vllm_lite {

constexpr TokenId kVocabulary = 50;

struct Kv {
  TokenId token = -1;
  int32_t position = -1;
  bool operator==(const Kv&) const = default;
};

// The next token: any function of all the tokens that the query sees, and of the seed.
class Sampler {
 public:
  explicit Sampler(uint64_t seed) : hash_(seed * 0x9e3779b97f4a7c15u + 1) {}
  void see(const Kv& kv) {
    hash_ ^= static_cast<uint64_t>(kv.token) * 1000003u + static_cast<uint64_t>(kv.position);
    hash_ *= 0xff51afd7ed558ccdu;
    hash_ ^= hash_ >> 33;
  }
  TokenId sample() const { return static_cast<TokenId>(hash_ % kVocabulary); }

 private:
  uint64_t hash_;
};

inline int32_t first_visible(int32_t position, int32_t window) {
  return window == 0 ? 0 : std::max(0, position - window + 1);
}

// What a sequence samples after `tokens` when it is alone in the world.
inline TokenId next_token(const std::vector<TokenId>& tokens, uint64_t seed, int32_t window) {
  Sampler sampler(seed);
  const auto last = static_cast<int32_t>(tokens.size()) - 1;
  for (int32_t p = first_visible(last, window); p <= last; ++p) {
    sampler.see({tokens[static_cast<size_t>(p)], p});
  }
  return sampler.sample();
}

class WorkerModel {
 public:
  WorkerModel(int32_t num_blocks, int32_t block_size, int32_t window)
      : block_size_(block_size),
        window_(window),
        slots_(static_cast<size_t>(num_blocks) * static_cast<size_t>(block_size)) {}

  // What a worker does before the forward pass. A step may fail after this as well as before it. A
  // plan that was made on top of a step that failed need not fit what the worker has.
  void take_in(const PlanView& plan, bool on_failed_step = false) {
    std::set<RowId> freed;
    for (RowId row : plan.freed_rows()) {
      EXPECT_TRUE(freed.insert(row).second) << "row " << row << " freed twice";
      rows_.erase(row);
    }
    for (const NewRow& row : plan.new_rows()) {
      EXPECT_TRUE(on_failed_step || !rows_.contains(row.row))
          << "row " << row.row << " is new but was not freed";
      rows_[row.row] = {.seed = row.sampling.row.seed_low, .table = {}};
    }
    for (int32_t i = 0; i < plan.header().num_table_updates; ++i) {
      const TableUpdate update = plan.table_update(i);
      ASSERT_TRUE(on_failed_step || rows_.contains(update.row));
      std::vector<BlockId>& table = rows_[update.row].table;
      const auto index = static_cast<size_t>(update.index);
      if (index >= table.size()) table.resize(index + 1, kNoBlock);
      table[index] = update.block;
    }
  }

  // `tokens_of(row)` is the oracle: the tokens that the row's sequence has, with the drafts of this
  // step behind them, or nullptr if the row failed in an earlier step.
  template <typename TokensOf>
  std::vector<TokenId> forward(const PlanView& plan, TokensOf tokens_of) {
    std::set<int32_t> copied;
    for (size_t i = 0; i < plan.copies().size(); i += 2) {
      copied.insert(plan.copies()[i]);
      EXPECT_TRUE(copied.insert(~plan.copies()[i + 1]).second) << "two copies to one block";
    }
    for (size_t i = 0; i < plan.copies().size(); i += 2) {
      EXPECT_FALSE(copied.contains(plan.copies()[i + 1])) << "a copy's destination is a source";
      for (int32_t offset = 0; offset < block_size_; ++offset) {
        at(plan.copies()[i + 1], offset) = at(plan.copies()[i], offset);
      }
    }
    std::set<int64_t> written;
    int32_t num_placeholders = 0;
    for (int32_t token = 0; token < plan.header().num_tokens; ++token) {
      EXPECT_TRUE(written.insert(plan.slot(token)).second) << "slot written twice";
      TokenId id = plan.token_ids()[static_cast<size_t>(token)];
      if (id < 0) {
        ++num_placeholders;
        EXPECT_TRUE(last_sampled_.contains(-1 - id));
        id = last_sampled_[-1 - id];
      }
      slots_.at(static_cast<size_t>(plan.slot(token))) = {
          id, plan.positions()[static_cast<size_t>(token)]};
    }
    EXPECT_EQ(plan.header().num_placeholders, num_placeholders);

    std::map<int32_t, std::pair<RowId, TokenId>> sampled;  // by token of the step
    std::set<RowId> seen_rows;
    for (size_t i = 0; i < plan.rows().size(); ++i) {
      const RowId row = plan.rows()[i];
      EXPECT_TRUE(seen_rows.insert(row).second) << "row twice in a step";
      EXPECT_TRUE(rows_.contains(row));
      const std::vector<TokenId>* const own = tokens_of(row);
      const std::vector<BlockId>& table = rows_[row].table;
      for (int32_t t = plan.query_start()[i]; t < plan.query_start()[i + 1]; ++t) {
        const int32_t position = plan.positions()[static_cast<size_t>(t)];
        const int32_t first = plan.positions()[static_cast<size_t>(plan.query_start()[i])];
        EXPECT_EQ(position, first + t - plan.query_start()[i]);
        EXPECT_EQ(plan.slot(t), slot_of(table, position));
        Sampler sampler(rows_[row].seed);
        for (int32_t p = first_visible(position, window_); p <= position; ++p) {
          const Kv kv = slots_.at(static_cast<size_t>(slot_of(table, p)));
          if (own != nullptr) {
            EXPECT_EQ(kv, (Kv{own->at(static_cast<size_t>(p)), p})) << "row " << row << " at " << p;
          }
          sampler.see(kv);
        }
        sampled[t] = {row, sampler.sample()};
      }
      EXPECT_EQ(plan.seq_lens()[i],
                plan.positions()[static_cast<size_t>(plan.query_start()[i + 1]) - 1] + 1);
    }
    std::vector<TokenId> result;
    for (int32_t index : plan.logits_indices()) {
      const auto [row, token] = sampled.at(index);
      result.push_back(token);
      last_sampled_[row] = token;
    }
    check_rounds(plan, sampled);
    return result;
  }

  // A forward pass that failed, or a failed row of it, may have stored anything for tokens [first,
  // end), and sampled anything.
  void spoil(const PlanView& plan, int32_t first, int32_t end) {
    for (int32_t token = first; token < end; ++token) {
      slots_.at(static_cast<size_t>(plan.slot(token))) = {-7, -7};
    }
    for (size_t i = 0; i < plan.rows().size(); ++i) {
      const int32_t last = plan.query_start()[i + 1] - 1;
      if (last >= first && last < end) last_sampled_[plan.rows()[i]] = 0;
    }
  }

 private:
  // That each logit at a draft is of the token behind its row's logit before, and that a row's
  // tokens end with its last logit.
  void check_rounds(const PlanView& plan,
                    const std::map<int32_t, std::pair<RowId, TokenId>>& sampled) const {
    const std::span<const int32_t> logits = plan.logits_indices();
    const auto num_samples = logits.size() - static_cast<size_t>(plan.header().num_drafts);
    std::map<RowId, int32_t> last;  // its logit before
    for (const int32_t index : logits.first(num_samples)) {
      EXPECT_TRUE(last.emplace(sampled.at(index).first, index).second) << "two samples of a row";
    }
    size_t begin = num_samples;
    auto most = static_cast<int32_t>(num_samples);
    for (const int32_t size : plan.draft_rounds()) {
      EXPECT_TRUE(size >= 1 && size <= most) << "a round has " << size << " after " << most;
      most = size;
      const auto round = logits.subspan(begin, static_cast<size_t>(size));
      EXPECT_TRUE(std::is_sorted(round.begin(), round.end()));
      for (const int32_t index : round) EXPECT_EQ(index, ++last.at(sampled.at(index).first));
      begin += round.size();
    }
    EXPECT_EQ(begin, logits.size());
    for (size_t i = 0; i < plan.rows().size(); ++i) {
      const auto found = last.find(plan.rows()[i]);
      EXPECT_TRUE(found == last.end() || found->second == plan.query_start()[i + 1] - 1);
    }
  }

  struct Row {
    uint32_t seed = 0;
    std::vector<BlockId> table;
  };
  int64_t slot_of(const std::vector<BlockId>& table, int32_t position) const {
    return int64_t{table.at(static_cast<size_t>(position / block_size_))} * block_size_ +
           position % block_size_;
  }
  Kv& at(BlockId block, int32_t offset) {
    return slots_.at(static_cast<size_t>(int64_t{block} * block_size_ + offset));
  }

  const int32_t block_size_;
  const int32_t window_;
  std::vector<Kv> slots_;
  std::map<RowId, Row> rows_;
  std::map<RowId, TokenId> last_sampled_;
};

}  // namespace vllm_lite
