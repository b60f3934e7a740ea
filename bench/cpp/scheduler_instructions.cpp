// Runs exactly N decode steps of 256 sequences in measured_steps(), the one function that
// check_instructions.py lets callgrind count.

#include <cstdio>
#include <cstdlib>

#include "scheduler_scenario.h"

extern "C" [[gnu::noinline]] void measured_steps(vllm_lite::DecodeScenario& scenario,
                                                 int num_steps) {
  for (int i = 0; i < num_steps; ++i) scenario.step();
}

int main(int argc, char** argv) {
  const int num_steps = argc > 1 ? std::atoi(argv[1]) : 0;
  if (num_steps < 1 || num_steps > vllm_lite::DecodeScenario::kOutput / 2) {
    std::fprintf(stderr, "usage: scheduler_instructions STEPS (1 to %d)\n",
                 vllm_lite::DecodeScenario::kOutput / 2);
    return 2;
  }
  vllm_lite::DecodeScenario scenario(256);
  measured_steps(scenario, num_steps);
  return 0;
}
