// Seeded random traces of add, finish, plan, commit, cancel and recompute_all on random, mostly
// tiny configurations, against the worker model and the naive policy. Asynchronous traces have a
// delayed worker, which answers a plan after the next was made; synchronous ones have drafts, of
// which the first so many are right.

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <string>

#include "../cache/cache_test_util.h"
#include "naive_policy.h"
#include "scheduler/scheduler.h"
#include "scheduler/step_builder.h"
#include "worker_model.h"

namespace vllm_lite {
namespace {

// How often the traces reached what they are for.
struct Coverage {
  int64_t preemptions = 0;
  int64_t prefix_hits = 0;
  int64_t evictions = 0;
  int64_t copies = 0;
  int64_t passed_over = 0;
  int64_t cancelled = 0;
  int64_t predicted = 0;
  int64_t predicted_with_cache = 0;
  int64_t placeholders = 0;
  int64_t preempted_pending = 0;  // preempted while a token was to come
  int64_t thrown_away = 0;        // samples of sequences that had ended
  int64_t held_back = 0;          // plans times sequences
  int64_t let_go = 0;             // admitted with a hit after it was held back
  int64_t announced = 0;          // plans times running sequences
  int64_t cut_off = 0;            // of those, others do not find all of it
  int64_t drafts = 0;             // computed
  int64_t accepted = 0;
  int64_t resumed_drafts = 0;  // computed with all tokens of a preempted sequence
  int64_t failed_drafts = 0;   // rows that failed at an accepted one
  std::array<int64_t, kNumDraftLimits> cuts{};
};

class Trace {
 public:
  Coverage coverage;

  Trace(uint32_t seed, bool is_async)
      : random_(seed), max_in_flight_(is_async ? kMaxStepsInFlight : 1) {
    cache_config_.block_size = 1 << pick(0, 3);
    cache_config_.num_blocks = pick(4, 24);
    cache_config_.enable_prefix_caching = chance(0.5);
    cache_config_.sliding_window = chance(0.3) ? pick(1, 12) : 0;
    config_.max_num_seqs = pick(1, 8);
    config_.max_num_batched_tokens = pick(1, 24);
    config_.max_model_len =
        pick(2, std::min(60, cache_config_.num_blocks * cache_config_.block_size));
    config_.max_num_waiting = pick(1, 20);
    config_.max_chunk_tokens = chance(0.5) ? pick(1, 8) : 0;
    config_.policy = chance(0.5) ? SchedulingPolicy::kPriority : SchedulingPolicy::kFirstCome;
    config_.look_past = pick(0, 4);
    config_.max_passed_over = pick(0, 4);
    config_.min_awaited_tokens = chance(0.8) ? pick(1, 8) : 0;
    if (!is_async && chance(0.6)) {
      config_.num_speculative_tokens = pick(1, 5);
      config_.max_num_logits = chance(0.4) ? config_.max_num_seqs + pick(0, 6) : 0;
    }
    failures_ = chance(0.3);
    aborts_ = chance(0.5);
    cache_ = std::make_unique<KvCacheManager>(cache_config_);
    scheduler_ = std::make_unique<Scheduler>(config_, *cache_);
    builder_ = std::make_unique<StepBuilder>(config_, cache_config_.block_size);
    restart_worker();
    for (TokenId& token : common_) token = pick(0, kVocabulary - 1);
  }

  void run(int32_t num_steps) {
    for (int32_t i = 0; i < num_steps; ++i) {
      if (chance(0.5)) add_request();
      step();
      if (testing::Test::HasFailure()) return;
    }
    // Everything ends, without failures in a bounded number of steps.
    failures_ = false;
    draining_ = true;
    for (int32_t left = 20000; scheduler_->has_work(); --left) {
      ASSERT_GT(left, 0) << "the scheduler does not come to an end";
      step();
      if (testing::Test::HasFailure()) return;
    }
    ASSERT_TRUE(live_.empty() && in_flight_.empty());
    EXPECT_EQ(cache_->num_used_blocks(), 0);
    EXPECT_EQ(cache_->num_available_blocks(), cache_config_.num_blocks);
    EXPECT_TRUE(scheduler_->plan().empty());
    coverage.preemptions = scheduler_->stats().num_preemptions;
    coverage.prefix_hits = cache_->stats().prefix_hits;
    coverage.evictions = cache_->stats().evictions;
  }

 private:
  struct Live {
    Sequence sequence;
    SamplingParams sampling;
    std::vector<TokenId> prompt;
    bool failed = false;        // a row of it did
    int32_t num_announced = 0;  // tokens that it had when it was admitted
    bool held_back = false;     // by the last plan
  };
  // A plan on its way. Rows are those at plan time: a sequence may lose its row before the result.
  struct PlannedStep {
    std::vector<int32_t> words;
    std::vector<ScheduledSequence> parts;
    std::vector<std::pair<RowId, Live*>> rows;
  };

  int32_t pick(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random_);
  }
  bool chance(double p) { return std::bernoulli_distribution(p)(random_); }

  void restart_worker() {
    worker_ = std::make_unique<WorkerModel>(cache_config_.num_blocks, cache_config_.block_size,
                                            cache_config_.sliding_window);
  }

  // The leading tokens that the sequence announced, as far as others find them. Where it shares the
  // beginning with somebody who announced that before and has given up since, they do not until it
  // has computed that beginning: that must be rare.
  int32_t announced_tokens(const Live& live) {
    const Sequence& s = live.sequence;
    const bool announces = cache_config_.enable_prefix_caching &&
                           cache_config_.sliding_window == 0 && s.state == SequenceState::kRunning;
    if (!announces || s.num_computed >= live.num_announced) return 0;
    const std::span<const TokenId> tokens(s.tokens.data(), static_cast<size_t>(live.num_announced));
    const auto found = KvCacheManagerPeer::find_prefix(*cache_, tokens, s.salt, true);
    const auto num_found = static_cast<int32_t>(found.size()) * cache_config_.block_size;
    ++coverage.announced;
    coverage.cut_off += live.num_announced - num_found >= cache_config_.block_size;
    return num_found;
  }

  void add_request() {
    const int32_t prompt_len = std::min(pick(1, 40), config_.max_model_len - 1);
    std::vector<TokenId> prompt;
    const int32_t num_common = chance(0.6) ? pick(0, prompt_len) : 0;
    for (int32_t i = 0; i < prompt_len; ++i) {
      prompt.push_back(i < num_common ? common_[i] : pick(0, kVocabulary - 1));
    }
    const int32_t total = pick(prompt_len + 1, config_.max_model_len);
    const int32_t priority = pick(-1, 1);
    const uint64_t salt = chance(0.2) ? 1 : 0;
    const int32_t num_samples = chance(0.3) ? pick(2, 5) : 1;
    Sequence* parent = nullptr;
    for (int32_t i = 0; i < num_samples; ++i) {
      auto live = std::make_unique<Live>();
      Sequence& s = live->sequence;
      live->prompt = prompt;
      live->sampling.row.seed_low = static_cast<uint32_t>(next_seed_++);
      if (chance(0.2)) live->sampling.row.repetition_penalty = 1.5f;
      s.tokens = prompt;
      s.num_prompt_tokens = prompt_len;
      s.max_total_tokens = total;
      s.priority = priority;
      s.salt = {salt, 0};
      s.sampling = &live->sampling;
      s.fork_parent = parent;
      if (scheduler_->add(&s) == AddResult::kQueueFull) {
        EXPECT_GE(scheduler_->stats().num_waiting, config_.max_num_waiting);
        EXPECT_EQ(s.state, SequenceState::kNew);
        return;
      }
      if (parent == nullptr) parent = &s;
      live_.push_back(std::move(live));
    }
  }

  void finish_random() {
    if (live_.empty()) return;
    Sequence& s =
        live_[static_cast<size_t>(pick(0, static_cast<int32_t>(live_.size()) - 1))]->sequence;
    if (s.state != SequenceState::kFinished) scheduler_->finish(&s);
  }

  // Checks and drops finished sequences. Freed memory shows a dangling pointer to the sanitizer.
  void reap() {
    std::erase_if(live_, [this](const std::unique_ptr<Live>& live) {
      const Sequence& s = live->sequence;
      if (s.state != SequenceState::kFinished || scheduler_->in_flight(&s)) return false;
      EXPECT_EQ(s.tokens, extended(*live, live->prompt, s.tokens.size()));
      EXPECT_LE(s.num_tokens(), s.max_total_tokens);
      EXPECT_EQ(s.row, -1);
      EXPECT_TRUE(s.block_table.blocks.empty());
      return true;
    });
  }

  // `tokens` and what the sequence samples after them.
  std::vector<TokenId> extended(const Live& live, std::vector<TokenId> tokens, size_t size) const {
    while (tokens.size() < size) {
      tokens.push_back(
          next_token(tokens, live.sampling.row.seed_low, cache_config_.sliding_window));
    }
    return tokens;
  }

  void step() {
    if (aborts_ && chance(0.1)) finish_random();
    reap();
    const bool planned = in_flight_.size() < max_in_flight_ && plan_step();
    if (testing::Test::HasFailure()) return;
    if (!draining_ && chance(0.2)) add_request();
    if (aborts_ && chance(0.2)) finish_random();
    const bool waits = planned ? in_flight_.size() == max_in_flight_ || chance(0.1) : chance(0.8);
    if (!in_flight_.empty() && waits) end_step();
    scheduler_->check_invariants();
    reap();
  }

  // As many as it likes for each sequence, those running and those that wait.
  void set_drafts() {
    for (const auto& live : live_) {
      Sequence& s = live->sequence;
      if (s.state == SequenceState::kFinished || chance(0.2)) continue;
      const auto num_right =
          static_cast<size_t>(chance(0.5) ? pick(0, config_.num_speculative_tokens) : 0);
      const auto all = extended(*live, s.tokens, s.tokens.size() + num_right);
      s.drafts.assign(all.begin() + s.num_tokens(), all.end());
      for (int32_t left = pick(0, 3); left > 0; --left) {
        s.drafts.push_back(pick(0, kVocabulary - 1));
      }
    }
  }

  // False if the step is empty.
  bool plan_step() {
    if (config_.num_speculative_tokens > 0) set_drafts();
    std::vector<const Sequence*> all;
    NaiveKnowledge known;
    std::set<const Sequence*> decodes, forked;
    std::map<const Sequence*, std::pair<int32_t, int32_t>> before;  // passed over, preemptions
    std::map<const Sequence*, int32_t> pending_before;
    for (const auto& live : live_) {
      const Sequence& s = live->sequence;
      all.push_back(&s);
      if (scheduler_->in_flight(&s)) known.in_flight.insert(&s);
      if (cache_->awaits(s.block_table)) known.awaiting.insert(&s);
      known.announced[&s] = announced_tokens(*live);
      if (s.state == SequenceState::kWaiting) {
        known.hits[&s] = KvCacheManagerPeer::find_prefix(*cache_, s.tokens, s.salt);
      }
      const Sequence* parent = s.fork_parent;
      if (parent != nullptr && parent->state == SequenceState::kRunning &&
          s.num_prompt_tokens > 1) {
        forked.insert(&s);
      }
      const int32_t num_tokens = s.num_tokens() + s.num_pending;
      if (num_tokens < s.max_total_tokens && num_tokens - s.num_planned == 1) decodes.insert(&s);
      before[&s] = {s.num_passed_over, s.num_preemptions};
      pending_before[&s] = s.num_pending;
    }
    NaiveDecision expected;
    if (cache_config_.sliding_window == 0) {
      expected = NaivePolicy(config_, cache_config_).decide(all, known);
    }
    const int64_t evictions = cache_->stats().evictions;
    const Step& step = scheduler_->plan();
    scheduler_->check_invariants();
    const bool predictable =
        cache_config_.sliding_window == 0 && cache_->stats().evictions == evictions;
    EXPECT_FALSE(step.empty() && in_flight_.empty() && !live_.empty())
        << "an empty step while there is work";
    if (predictable) check_decision(step, expected, before);
    for (const auto& live : live_) {
      const Sequence& s = live->sequence;
      coverage.preempted_pending +=
          s.num_preemptions > before.at(&s).second && pending_before.at(&s) > 0;
      if (s.state == SequenceState::kRunning && decodes.contains(&s)) {  // K = 1
        EXPECT_EQ(s.num_planned, s.num_tokens() + pending_before.at(&s)) << "a decode got no token";
      }
    }
    for (const auto& live : live_) {
      const Sequence& s = live->sequence;
      if (s.state == SequenceState::kRunning && known.hits.contains(&s)) {
        live->num_announced = forked.contains(&s) ? 0 : s.num_tokens();
        coverage.let_go += live->held_back && s.block_table.num_hit_blocks > 0;
      }
      live->held_back = cache_->awaits(s.block_table);
    }
    if (step.empty()) return false;
    check_limits(step);
    coverage.copies += static_cast<int64_t>(step.copies.size());
    coverage.predicted += predictable;
    coverage.predicted_with_cache += predictable && cache_config_.enable_prefix_caching;
    coverage.passed_over += static_cast<int64_t>(expected.passed_over.size());
    coverage.held_back += static_cast<int64_t>(expected.held_back.size());
    for (size_t i = 0; i < kNumDraftLimits; ++i) {
      coverage.cuts[i] += predictable ? expected.cuts[i] : 0;
    }

    const auto words = builder_->build(step, ++step_id_);
    const PlanView plan(words);
    EXPECT_EQ(plan.step(), step_id_);
    coverage.placeholders += plan.header().num_placeholders;
    EXPECT_TRUE(max_in_flight_ > 1 || plan.header().num_placeholders == 0);
    PlannedStep& planned = in_flight_.emplace_back();
    planned.words.assign(words.begin(), words.end());
    planned.parts.assign(step.sequences.begin(), step.sequences.end());
    for (const ScheduledSequence& part : step.sequences) {
      const auto live = std::find_if(live_.begin(), live_.end(), [&](const auto& candidate) {
        return &candidate->sequence == part.sequence;
      });
      planned.rows.emplace_back(part.sequence->row, live->get());
    }
    return true;
  }

  // The worker carries out the oldest plan, and its result comes back.
  void end_step() {
    if (failures_ && chance(0.2)) return fail_steps();
    const PlannedStep planned = std::move(in_flight_.front());
    in_flight_.pop_front();
    const PlanView plan(planned.words);
    // What a sequence that has ended would have is what the worker computes.
    std::map<RowId, std::vector<TokenId>> tokens;
    for (size_t i = 0; i < planned.parts.size(); ++i) {
      const auto [row, live] = planned.rows[i];
      if (live->failed) continue;
      const Sequence& s = live->sequence;
      const int32_t num_drafts = planned.parts[i].num_drafts;
      const auto end = static_cast<size_t>(plan.seq_lens()[i] - num_drafts);
      tokens[row] = extended(*live, s.tokens, end);
      tokens[row].insert(tokens[row].end(), s.drafts.begin(), s.drafts.begin() + num_drafts);
    }
    worker_->take_in(plan);
    const auto sampled = worker_->forward(
        plan, [&](RowId row) { return tokens.contains(row) ? &tokens[row] : nullptr; });
    commit(planned, plan, sampled);
  }

  // The oldest step fails; the worker may have gone on to the one that was planned on top of it.
  void fail_steps() {
    const bool restart = chance(0.3);
    bool on_failed_step = false;
    std::set<const Sequence*> admitted;
    std::map<const Sequence*, int32_t> computed;
    for (const PlannedStep& planned : in_flight_) {
      if (!restart && chance(0.6)) {
        const PlanView plan(planned.words);
        worker_->take_in(plan, on_failed_step);
        worker_->spoil(plan, 0, plan.header().num_tokens);
      }
      on_failed_step = true;
      for (const ScheduledSequence& part : planned.parts) {
        computed[part.sequence] = part.sequence->num_computed;
        if (part.new_row || part.sequence->state == SequenceState::kWaiting) {
          admitted.insert(part.sequence);
        }
      }
      ++coverage.cancelled;
    }
    in_flight_.clear();
    scheduler_->cancel_steps();
    for (const auto& [s, num_computed] : computed) {
      EXPECT_FALSE(scheduler_->in_flight(s));
      if (s->state == SequenceState::kFinished) continue;
      EXPECT_EQ(s->state, admitted.contains(s) ? SequenceState::kWaiting : SequenceState::kRunning);
      EXPECT_EQ(s->num_computed, admitted.contains(s) ? 0 : num_computed);
      EXPECT_EQ(s->num_planned, s->num_computed);
      EXPECT_EQ(s->num_pending, 0);
    }
    if (!restart) return;
    restart_worker();
    scheduler_->recompute_all();
    EXPECT_EQ(scheduler_->stats().num_running, 0);
    EXPECT_EQ(cache_->num_used_blocks(), 0);
  }

  void commit(const PlannedStep& planned, const PlanView& plan, std::vector<TokenId> sampled) {
    std::vector<Sequence*> failed;
    std::vector<Sequence*> done;
    std::map<const Sequence*, std::vector<TokenId>> expected;
    std::vector<size_t> next_round;  // the round's next logit
    size_t sample = 0;
    auto end_of_logits = static_cast<size_t>(plan.header().num_logits - plan.header().num_drafts);
    for (const int32_t size : plan.draft_rounds()) {
      next_round.push_back(end_of_logits);
      end_of_logits += static_cast<size_t>(size);
    }
    int32_t end = 0;
    for (size_t i = 0; i < planned.parts.size(); ++i) {
      const ScheduledSequence& part = planned.parts[i];
      Sequence& s = *part.sequence;
      const int32_t first = end;
      end += part.num_tokens + part.num_drafts;
      if (!part.samples) continue;
      coverage.thrown_away += s.state == SequenceState::kFinished;
      std::vector<size_t> logits = {sample++};
      for (int32_t round = 0; round < part.num_drafts; ++round) {
        logits.push_back(next_round[static_cast<size_t>(round)]++);
      }
      if (failures_ && chance(part.num_drafts > 0 ? 0.1 : 0.02)) {
        const int32_t at = pick(0, part.num_drafts);
        sampled[logits[static_cast<size_t>(at)]] = kNoToken;
        worker_->spoil(plan, at == 0 ? first : first + part.num_tokens + at - 1, end);
      }
      std::vector<TokenId>& tokens = expected[&s];
      tokens = s.tokens;
      size_t num_right = 0;
      while (num_right + 1 < logits.size() && sampled[logits[num_right]] == s.drafts[num_right]) {
        tokens.push_back(s.drafts[num_right++]);
      }
      const TokenId last = sampled[logits[num_right]];
      if (last != kNoToken) tokens.push_back(last);
      coverage.drafts += part.num_drafts;
      coverage.accepted += static_cast<int64_t>(num_right);
      coverage.resumed_drafts += s.num_preemptions > 0 && part.new_row ? part.num_drafts : 0;
      coverage.failed_drafts += last == kNoToken && num_right > 0;
      planned.rows[i].second->failed |= last == kNoToken;
      (last == kNoToken ? failed : done).push_back(&s);
      if (s.state == SequenceState::kFinished) tokens = s.tokens;
    }
    ASSERT_EQ(end_of_logits, sampled.size());
    scheduler_->commit(sampled);
    for (const auto& [s, tokens] : expected) EXPECT_EQ(s->tokens, tokens);
    for (Sequence* s : failed) {
      if (s->state != SequenceState::kFinished) scheduler_->finish(s);
    }
    for (Sequence* s : done) {
      if (s->state == SequenceState::kFinished) continue;
      if (s->num_tokens() == s->max_total_tokens || chance(0.03)) scheduler_->finish(s);
    }
  }

  void check_decision(const Step& step, const NaiveDecision& expected,
                      const std::map<const Sequence*, std::pair<int32_t, int32_t>>& before) {
    std::vector<std::tuple<const Sequence*, int32_t, int32_t, int32_t>> scheduled;
    for (const ScheduledSequence& part : step.sequences) {
      scheduled.emplace_back(part.sequence, part.first_token, part.num_tokens, part.num_drafts);
    }
    EXPECT_EQ(scheduled, expected.scheduled);
    for (const auto& [s, counts] : before) {
      EXPECT_EQ(s->num_preemptions - counts.second, expected.preempted.contains(s));
      if (s->state != SequenceState::kWaiting) continue;
      EXPECT_EQ(s->num_passed_over - counts.first, expected.passed_over.contains(s));
    }
  }

  void check_limits(const Step& step) {
    int32_t num_tokens = 0;
    int32_t num_samples = 0;
    int32_t num_drafts = 0;
    std::set<const Sequence*> scheduled;
    for (const ScheduledSequence& part : step.sequences) {
      EXPECT_GE(part.num_tokens, 1);
      EXPECT_TRUE(scheduled.insert(part.sequence).second);
      EXPECT_TRUE(scheduler_->in_flight(part.sequence));
      if (config_.max_chunk_tokens > 0) {
        EXPECT_LE(part.num_tokens + part.num_drafts, config_.max_chunk_tokens);
      }
      EXPECT_TRUE(part.samples || part.num_drafts == 0);
      EXPECT_LE(part.num_drafts, config_.num_speculative_tokens);
      num_tokens += part.num_tokens + part.num_drafts;
      num_samples += part.samples;
      num_drafts += part.num_drafts;
    }
    EXPECT_EQ(step.num_tokens, num_tokens);
    EXPECT_EQ(step.num_samples, num_samples);
    EXPECT_EQ(step.num_drafts, num_drafts);
    if (config_.max_num_logits > 0) {
      EXPECT_LE(step.num_logits(), config_.max_num_logits);
    }
    EXPECT_LE(num_tokens, config_.max_num_batched_tokens);
    EXPECT_LE(static_cast<int32_t>(step.sequences.size()), config_.max_num_seqs);
  }

  std::mt19937 random_;
  const size_t max_in_flight_;
  KvCacheConfig cache_config_;
  SchedulerConfig config_;
  bool failures_ = false;
  bool aborts_ = false;
  bool draining_ = false;
  TokenId common_[40];
  uint64_t next_seed_ = 1;
  uint64_t step_id_ = 0;
  std::unique_ptr<KvCacheManager> cache_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<StepBuilder> builder_;
  std::unique_ptr<WorkerModel> worker_;
  std::vector<std::unique_ptr<Live>> live_;
  std::deque<PlannedStep> in_flight_;  // oldest first
};

struct RandomTrace : testing::TestWithParam<bool> {};

// VLLM_LITE_TRACES=first:count runs other seeds, for example for a long run or to repeat one.
// SCH-06
TEST_P(RandomTrace, HoldsEveryInvariantAndGivesEverySequenceItsOwnTokens) {
  const bool is_async = GetParam();
  uint32_t first = 1;
  uint32_t count = is_async ? 3000 : 1500;
  if (const char* traces = std::getenv("VLLM_LITE_TRACES")) {
    ASSERT_EQ(std::sscanf(traces, "%u:%u", &first, &count), 2);
  }
  Coverage sum;
  for (uint32_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Trace trace(seed, is_async);
    trace.run(60);
    if (HasFailure()) return;
    for (int64_t Coverage::* field :
         {&Coverage::preemptions, &Coverage::prefix_hits, &Coverage::evictions, &Coverage::copies,
          &Coverage::passed_over, &Coverage::cancelled, &Coverage::predicted,
          &Coverage::predicted_with_cache, &Coverage::placeholders, &Coverage::preempted_pending,
          &Coverage::thrown_away, &Coverage::held_back, &Coverage::let_go, &Coverage::announced,
          &Coverage::cut_off, &Coverage::drafts, &Coverage::accepted, &Coverage::resumed_drafts,
          &Coverage::failed_drafts}) {
      sum.*field += trace.coverage.*field;
    }
    for (size_t i = 0; i < kNumDraftLimits; ++i) sum.cuts[i] += trace.coverage.cuts[i];
  }
  std::printf(
      "preemptions %ld (%ld with a token to come), prefix hits %ld, evictions %ld, copies %ld, "
      "passed over %ld, cancelled %ld, predicted %ld (%ld with prefix caching), placeholders %ld, "
      "thrown away %ld, held back %ld, let go %ld, announced %ld (%ld cut off), drafts %ld (%ld "
      "with "
      "resumed sequences), accepted %ld (%ld rows failed at them), cut by num_speculative_tokens "
      "%ld, budget %ld, logits %ld, max_total_tokens %ld, chunk %ld, blocks %ld\n",
      sum.preemptions, sum.preempted_pending, sum.prefix_hits, sum.evictions, sum.copies,
      sum.passed_over, sum.cancelled, sum.predicted, sum.predicted_with_cache, sum.placeholders,
      sum.thrown_away, sum.held_back, sum.let_go, sum.announced, sum.cut_off, sum.drafts,
      sum.resumed_drafts, sum.accepted, sum.failed_drafts, sum.cuts[kSpeculative],
      sum.cuts[kBudget], sum.cuts[kLogits], sum.cuts[kTotal], sum.cuts[kChunk], sum.cuts[kBlocks]);
  if (count < 1500) return;
  EXPECT_GT(sum.preemptions, 1000);
  EXPECT_GT(sum.prefix_hits, 1000);
  EXPECT_GT(sum.evictions, 1000);
  EXPECT_GT(sum.copies, 1000);
  EXPECT_GT(sum.passed_over, 100);
  EXPECT_GT(sum.cancelled, 1000);
  EXPECT_GT(sum.predicted, 10000);
  EXPECT_GT(sum.predicted_with_cache, 10000);
  EXPECT_GT(sum.held_back, 500);
  EXPECT_GT(sum.let_go, 100);
  EXPECT_LT(sum.cut_off * 100, sum.announced);
  if (!is_async) {
    EXPECT_GT(sum.accepted, 10000);
    EXPECT_GT(sum.drafts, sum.accepted + 10000);
    EXPECT_GT(sum.resumed_drafts, 100);
    EXPECT_GT(sum.failed_drafts, 10);
    for (const int64_t cuts : sum.cuts) EXPECT_GT(cuts, 100);
    return;
  }
  EXPECT_GT(sum.placeholders, 10000);
  EXPECT_GT(sum.preempted_pending, 500);
  EXPECT_GT(sum.thrown_away, 1000);
}

INSTANTIATE_TEST_SUITE_P(Depth, RandomTrace, testing::Bool(), [](const auto& is_async) {
  return is_async.param ? "Asynchronous" : "Synchronous";
});

}  // namespace
}  // namespace vllm_lite
