// Turns a scheduled Step into a flat StepPlan (step_plan.h), sending only what changed in block
// tables.
//
// The worker keeps a row's block table between steps. An entry is sent once, in the step that first
// uses it; a new row gets its whole table (but for
// entries that a sliding window has passed already). Entries that later fall out of a sliding
// window are not recalled.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/scheduler.h"
#include "scheduler/step_plan.h"

namespace vllm_lite {

class StepBuilder {
 public:
  // Reserves once for the largest plan that the limits allow, lists and constraints of rows aside;
  // past kMaxReservedWords the buffer grows when a plan needs it. `block_size` is a power of two.
  StepBuilder(const SchedulerConfig& config, int32_t block_size);

  // The returned words hold until the next call. Advances Sequence::num_blocks_sent.
  // REQUIRES: the step is what plan() returned last, the scheduler was not called since, it is not
  // empty, and every new row's sequence has its sampling parameters.
  std::span<const int32_t> build(const Step& step, uint64_t step_id);

  static constexpr size_t kMaxReservedWords = size_t{1} << 24;

 private:
  int32_t block_shift_;  // log2 of the block size
  std::vector<int32_t> words_;
};

}  // namespace vllm_lite
