// Turns a scheduled Step into a flat StepPlan (step_plan.h), sending only what changed in block tables.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/scheduler.h"
#include "scheduler/step_plan.h"

namespace vllm_lite {

class StepBuilder {
 public:
  // Reserves once for the largest plan that the limits allow, histories and bias lists aside.
  StepBuilder(const SchedulerConfig& config, int32_t block_size);

  // The returned words hold until the next call. Advances Sequence::num_blocks_sent.
  std::span<const int32_t> build(const Step& step, uint64_t step_id);

 private:
  int32_t block_size_;
  std::vector<int32_t> words_;
};

}  // namespace vllm_lite
