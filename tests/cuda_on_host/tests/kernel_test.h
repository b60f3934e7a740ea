// What the tests of the host layer share.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/device.h"

// Options are as at first in every test.
class KernelTest : public testing::Test {
 protected:
  ~KernelTest() override { cuda_on_host::options() = before_; }

 private:
  cuda_on_host::Options before_ = cuda_on_host::options();
};

// What the launch in `run` is reproached with; empty if nothing.
template <typename F>
std::string error_of(F&& run) {
  try {
    run();
  } catch (const cuda_on_host::KernelError& error) {
    return error.what();
  }
  return "";
}

// In order and in some random orders.
template <typename F>
void for_each_order(F&& run) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    cuda_on_host::options().seed = seed;
    run();
  }
}

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)
