// The policy of scheduler.h once more, slow and obvious: from a snapshot of all sequences it says
// what plan() must decide. For configurations without sliding window, where the room that a
// sequence needs can be counted from the outside, and for plans in which no cached block is
// evicted: what the prefix index has is told once, as it was before.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "scheduler/scheduler.h"

namespace vllm_lite {

// What the policy cannot know from the sequences alone.
struct NaiveKnowledge {
  std::set<const Sequence*> in_flight;
  std::map<const Sequence*, std::vector<BlockId>> hits;  // of waiting sequences
  std::set<const Sequence*> awaiting;                    // held back by an earlier plan
  // Leading tokens of a running sequence that it said it would compute when it was admitted.
  std::map<const Sequence*, int32_t> announced;
};

// What may let a sequence have fewer drafts computed than it has.
enum DraftLimit { kSpeculative, kBudget, kLogits, kTotal, kChunk, kBlocks, kNumDraftLimits };

struct NaiveDecision {
  // First token, tokens, drafts.
  std::vector<std::tuple<const Sequence*, int32_t, int32_t, int32_t>> scheduled;
  std::set<const Sequence*> preempted;
  std::set<const Sequence*> passed_over;
  std::set<const Sequence*> held_back;
  std::array<int64_t, kNumDraftLimits> cuts{};  // sequences, by what cut their drafts
};

class NaivePolicy {
 public:
  NaivePolicy(const SchedulerConfig& config, const KvCacheConfig& cache)
      : config_(config),
        num_blocks_(cache.num_blocks),
        block_size_(cache.block_size),
        next_block_(cache.num_blocks),
        min_awaited_(cache.enable_prefix_caching ? config.min_awaited_tokens : 0) {}

  NaiveDecision decide(const std::vector<const Sequence*>& sequences, const NaiveKnowledge& known) {
    std::vector<Item> running;
    std::vector<Item> waiting;
    for (const Sequence* s : sequences) {
      if (s->state == SequenceState::kRunning) {
        running.push_back(item(*s));
        running.back().announced = known.announced.at(s);
        running.back().committed = s->num_computed;
      }
      if (s->state == SequenceState::kWaiting) waiting.push_back(item(*s));
    }
    const auto item_before = [this](const Item& a, const Item& b) {
      return before(*a.sequence, *b.sequence);
    };
    std::sort(running.begin(), running.end(), item_before);
    std::sort(waiting.begin(), waiting.end(), item_before);

    NaiveDecision decision;
    int32_t budget = config_.max_num_batched_tokens;
    serve(running, budget, decision);
    if (decision.preempted.empty()) admit(running, waiting, known, budget, decision);
    add_drafts(running, budget, decision);
    return decision;
  }

 private:
  struct Item {
    const Sequence* sequence;
    int32_t computed;  // once the steps in flight are done
    std::vector<BlockId> blocks;
    int32_t committed = 0;  // tokens computed, without the steps in flight
    int32_t announced = 0;
    int32_t remaining() const {
      const int32_t tokens = sequence->num_tokens() + sequence->num_pending;
      return tokens == sequence->max_total_tokens ? 0 : tokens - computed;
    }
  };
  static Item item(const Sequence& s) { return {&s, s.num_planned, s.block_table.blocks}; }

  void serve(std::vector<Item>& running, int32_t& budget, NaiveDecision& decision) {
    for (size_t i = 0; i < running.size(); ++i) {
      int32_t reserved = 0;
      for (size_t j = i + 1; j < running.size(); ++j) reserved += running[j].remaining() == 1;
      const int32_t n = std::min({running[i].remaining(), chunk(), budget - reserved});
      if (n <= 0) continue;
      const int32_t missing =
          blocks_for(running[i].computed + n) - static_cast<int32_t>(running[i].blocks.size());
      while (missing > available(running)) {
        decision.preempted.insert(running.back().sequence);
        running.pop_back();
        if (running.size() == i) return;  // it preempted itself, the last
      }
      add_blocks(running[i], missing);
      decision.scheduled.emplace_back(running[i].sequence, running[i].computed, n, 0);
      budget -= n;
    }
  }

  void admit(std::vector<Item>& running, std::vector<Item>& waiting, const NaiveKnowledge& known,
             int32_t& budget, NaiveDecision& decision) {
    const auto max_running =
        static_cast<size_t>(std::min(config_.max_num_seqs, config_.max_num_batched_tokens));
    std::vector<const Sequence*> blocked;
    int32_t tried_past = 0;
    for (Item& candidate : waiting) {
      if (budget == 0 || running.size() >= max_running) break;
      if (known.in_flight.contains(candidate.sequence)) break;
      const Item* parent = nullptr;
      for (const Item& r : running) {
        if (r.sequence == candidate.sequence->fork_parent) parent = &r;
      }
      const int32_t prompt = candidate.sequence->num_prompt_tokens;
      if (parent != nullptr && parent->committed < prompt) continue;
      if (parent != nullptr && prompt > 1) {
        candidate.computed = prompt - 1;
        const auto whole = (prompt - 1) / block_size_;
        candidate.blocks.assign(parent->blocks.begin(), parent->blocks.begin() + whole);
      } else {
        candidate.blocks = known.hits.at(candidate.sequence);
        candidate.announced = candidate.sequence->num_tokens();
        candidate.computed = static_cast<int32_t>(candidate.blocks.size()) * block_size_;
      }
      candidate.committed = candidate.computed;
      if (known.awaiting.contains(candidate.sequence) ||
          ((parent == nullptr || prompt == 1) && is_worth_waiting(candidate, running))) {
        decision.held_back.insert(candidate.sequence);
        continue;
      }
      if (!blocked.empty() && tried_past++ >= config_.look_past) break;
      const int32_t missing = blocks_for(candidate.sequence->num_tokens()) -
                              static_cast<int32_t>(candidate.blocks.size());
      const auto headroom =
          std::min(static_cast<int32_t>(running.size()), std::max(1, num_blocks_ / 16));
      running.push_back(candidate);  // whose hits are no longer available
      const int32_t left = available(running);
      running.pop_back();
      if (missing + headroom > left) {
        blocked.push_back(candidate.sequence);
        if (candidate.sequence->num_passed_over >= config_.max_passed_over) break;
        continue;
      }
      add_blocks(candidate, missing);
      const int32_t n = std::min({candidate.remaining(), chunk(), budget});
      decision.scheduled.emplace_back(candidate.sequence, candidate.computed, n, 0);
      decision.passed_over.insert(blocked.begin(), blocked.end());
      budget -= n;
      running.push_back(candidate);
    }
  }

  // Out of what is left when everybody has been served.
  void add_drafts(std::vector<Item>& running, int32_t budget, NaiveDecision& decision) {
    if (config_.num_speculative_tokens == 0) return;
    const auto samples = [](const auto& scheduled) {
      const auto& [s, first, n, num_drafts] = scheduled;
      return first + n == s->num_tokens();
    };
    int32_t logits = config_.max_num_logits;
    if (logits == 0) logits = std::numeric_limits<int32_t>::max();
    logits -= static_cast<int32_t>(
        std::count_if(decision.scheduled.begin(), decision.scheduled.end(), samples));
    for (auto& scheduled : decision.scheduled) {
      auto& [s, first, n, num_drafts] = scheduled;
      if (!samples(scheduled) || s->drafts.empty()) continue;
      Item& own = *std::find_if(running.begin(), running.end(),
                                [&s = s](const Item& r) { return r.sequence == s; });
      const int32_t end = first + n;
      const int32_t blocks = static_cast<int32_t>(own.blocks.size()) + available(running);
      int32_t limits[kNumDraftLimits];
      limits[kSpeculative] = config_.num_speculative_tokens;
      limits[kBudget] = budget;
      limits[kLogits] = logits;
      limits[kTotal] = s->max_total_tokens - 1 - end;
      limits[kChunk] = chunk() - n;
      limits[kBlocks] = blocks * block_size_ - end;
      num_drafts = static_cast<int32_t>(s->drafts.size());
      const int32_t limit = *std::min_element(std::begin(limits), std::end(limits));
      if (limit < num_drafts) {
        num_drafts = limit;
        for (size_t i = 0; i < kNumDraftLimits; ++i) decision.cuts[i] += limits[i] == limit;
      }
      budget -= num_drafts;
      logits -= num_drafts;
      if (num_drafts == 0) continue;
      add_blocks(own, blocks_for(end + num_drafts) - static_cast<int32_t>(own.blocks.size()));
    }
  }

  void add_blocks(Item& to, int32_t count) {
    for (int32_t i = 0; i < count; ++i) to.blocks.push_back(next_block_++);
  }

  bool before(const Sequence& a, const Sequence& b) const {
    const bool priority = config_.policy == SchedulingPolicy::kPriority;
    return std::tuple(priority ? a.priority : 0, a.arrival) <
           std::tuple(priority ? b.priority : 0, b.arrival);
  }

  // All that run are served before the candidate, and some computes enough whole blocks that come
  // next after its hits.
  bool is_worth_waiting(const Item& candidate, const std::vector<Item>& running) const {
    const std::vector<TokenId>& tokens = candidate.sequence->tokens;
    int32_t most = 0;
    for (const Item& r : running) {
      if (before(*candidate.sequence, *r.sequence)) return false;
      // One that is further on announces nothing after these hits.
      if (r.sequence->salt != candidate.sequence->salt ||
          r.committed / block_size_ > candidate.computed / block_size_) {
        continue;
      }
      const auto end = std::min(tokens.size() - 1, static_cast<size_t>(r.announced));
      size_t common = 0;
      while (common < end && tokens[common] == r.sequence->tokens[common]) ++common;
      const int32_t end_of_common = static_cast<int32_t>(common) / block_size_ * block_size_;
      most = std::max(most, end_of_common - candidate.computed);
    }
    return min_awaited_ > 0 && most >= min_awaited_;
  }
  int32_t blocks_for(int32_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }
  int32_t chunk() const {
    return config_.max_chunk_tokens == 0 ? config_.max_num_batched_tokens
                                         : config_.max_chunk_tokens;
  }
  int32_t available(const std::vector<Item>& running) const {
    std::set<BlockId> held;
    for (const Item& r : running) held.insert(r.blocks.begin(), r.blocks.end());
    return num_blocks_ - static_cast<int32_t>(held.size());
  }

  const SchedulerConfig config_;
  const int32_t num_blocks_;
  const int32_t block_size_;
  BlockId next_block_;  // an id for a block that a decision adds
  const int32_t min_awaited_;
};

}  // namespace vllm_lite
