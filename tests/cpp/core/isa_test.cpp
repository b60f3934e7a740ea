#include "core/isa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "core/check.h"

namespace vllm_lite {

struct WhoParams {
  int* result;
};
VL_DECLARE_ISA_KERNEL(who, WhoParams)
void portable::who(const WhoParams& params) { *params.result = 0; }
void avx2::who(const WhoParams& params) { *params.result = 1; }
void avx512::who(const WhoParams& params) { *params.result = 2; }
static void who_cpu(const WhoParams& params) { VL_DISPATCH_ISA(who, params) }

namespace {

// Puts the choice back, so that other tests of this program see the environment's.
class IsaTest : public testing::Test {
 protected:
  ~IsaTest() override { set_isa(before_); }
  const Isa before_ = current_isa();
};

TEST_F(IsaTest, StartsWithAKnownSetThatTheProcessorHas) {
  EXPECT_LE(current_isa(), best_isa());
  EXPECT_STRNE(isa_name(current_isa()), "unknown");
}

// INS-01
TEST_F(IsaTest, EverySetUpToTheBestCanBeChosenAndTheDispatchFollows) {
  for (int32_t i = 0; i < kNumIsas; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (isa > best_isa()) {
      EXPECT_THROW(set_isa(isa), Error);
      continue;
    }
    set_isa(isa);
    EXPECT_EQ(current_isa(), isa);
    int result = -1;
    who_cpu({&result});
    EXPECT_EQ(result, std::min(i, 2));  // sets beyond have AVX-512's kernels
  }
}

TEST_F(IsaTest, NamesAreWhatTheEnvironmentVariableTakes) {
  EXPECT_STREQ(isa_name(Isa::kPortable), "portable");
  EXPECT_STREQ(isa_name(Isa::kAvx2), "avx2");
  EXPECT_STREQ(isa_name(Isa::kAvx512), "avx512");
  EXPECT_STREQ(isa_name(Isa::kAvx512Bf16), "avx512_bf16");
  EXPECT_STREQ(isa_name(Isa::kAmx), "amx");
}

// The environment is read once, at the first call: in a child process that has made none.
TEST(IsaEnvironmentDeathTest, ChoosesTheSetOrIsAnErrorThatListsTheNames) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto exit_with_choice = [](const char* wanted) {
    setenv("VLLM_LITE_CPU_ISA", wanted, 1);
    try {
      std::exit(static_cast<int>(current_isa()));
    } catch (const Error& error) {
      std::fputs(error.what(), stderr);
      std::exit(100);
    }
  };
  EXPECT_EXIT(exit_with_choice("portable"), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(exit_with_choice(""), testing::ExitedWithCode(static_cast<int>(best_isa())), "");
  EXPECT_EXIT(exit_with_choice("mmx"), testing::ExitedWithCode(100),
              "VLLM_LITE_CPU_ISA=mmx: must be one of portable, avx2, avx512, avx512_bf16, amx");
}

}  // namespace
}  // namespace vllm_lite
