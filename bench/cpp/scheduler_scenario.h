// Decoding sequences in steady state, for the scheduler's benchmark and its instruction count.
#pragma once

#include <memory>
#include <vector>

#include "scheduler/scheduler.h"
#include "scheduler/step_builder.h"

namespace vllm_lite {

class DecodeScenario {
 public:
  static constexpr int32_t kPrompt = 64;
  static constexpr int32_t kOutput = 1 << 13;

  // Prompts differ in length by up to a block, so that growth is spread evenly over the steps.
  explicit DecodeScenario(int32_t num_running)
      : cache_config_{.num_blocks = num_running * 600},
        config_(make_config(num_running)),
        sequences_(static_cast<size_t>(num_running)),
        sampled_(static_cast<size_t>(num_running), 5) {
    reset();
  }

  // Everybody computed to the end of the prompt, in a new pool.
  void reset() {
    scheduler_.reset();
    cache_ = std::make_unique<KvCacheManager>(cache_config_);
    scheduler_ = std::make_unique<Scheduler>(config_, *cache_);
    builder_ = std::make_unique<StepBuilder>(config_, cache_config_.block_size);
    for (size_t i = 0; i < sequences_.size(); ++i) {
      Sequence& s = sequences_[i];
      s = Sequence();
      s.num_prompt_tokens = kPrompt + static_cast<int32_t>(i % 16);
      s.tokens.assign(static_cast<size_t>(s.num_prompt_tokens), static_cast<TokenId>(i));
      s.max_total_tokens = s.num_prompt_tokens + kOutput;
      s.sampling = &sampling_;
      scheduler_->add(&s);
    }
    while (step() < static_cast<int32_t>(sequences_.size())) {
    }
    num_left_ = kOutput - 64;
  }

  // One whole step: plan, build, commit. Returns the number of samples.
  int32_t step() {
    const Step& planned = scheduler_->plan();
    num_words_ = builder_->build(planned, ++step_id_).size();
    const int32_t num_samples = planned.num_samples;
    scheduler_->commit({sampled_.data(), static_cast<size_t>(num_samples)});
    --num_left_;
    return num_samples;
  }

  bool needs_reset() const { return num_left_ <= 0; }
  size_t num_words() const { return num_words_; }

 private:
  static SchedulerConfig make_config(int32_t num_running) {
    SchedulerConfig config;
    config.max_num_seqs = num_running;
    config.max_num_batched_tokens = 8192;
    config.max_model_len = 9000;
    return config;
  }

  const KvCacheConfig cache_config_;
  const SchedulerConfig config_;
  SamplingParams sampling_;
  std::vector<Sequence> sequences_;
  std::vector<TokenId> sampled_;
  std::unique_ptr<KvCacheManager> cache_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<StepBuilder> builder_;
  uint64_t step_id_ = 0;
  size_t num_words_ = 0;
  int32_t num_left_ = 0;
};

}  // namespace vllm_lite
