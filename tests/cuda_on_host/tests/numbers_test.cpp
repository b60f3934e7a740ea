// Number formats and the functions of one thread.
#include <bit>
#include <cmath>
#include <limits>

#include "kernel_test.h"

namespace {

using namespace vllm_lite;
using namespace vllm_lite::device;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The value of a small float format by its definition.
double value_of(uint32_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t fraction = bits & ((1u << fraction_bits) - 1);
  const int exponent = static_cast<int>(bits >> fraction_bits & ((1u << exponent_bits) - 1));
  const double sign = bits >> (exponent_bits + fraction_bits) & 1 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1u << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

// Every finite value converts to itself, and what lies around the middle of two neighbours to the
// nearest, the middle to the even one.
template <typename T>
void check_format(int exponent_bits, int fraction_bits, uint32_t largest) {
  for (const uint32_t sign : {0u, 1u << (exponent_bits + fraction_bits)}) {
    for (uint32_t magnitude = 0; magnitude <= largest; ++magnitude) {
      const uint32_t bits = sign | magnitude;
      using Bits = decltype(T::bits);
      const double value = value_of(bits, exponent_bits, fraction_bits);
      const float x = to_float(T{static_cast<Bits>(bits)});
      ASSERT_EQ(x, value);
      ASSERT_EQ(std::signbit(x), sign != 0);
      ASSERT_EQ(from_float<T>(x).bits, bits);
      if (magnitude == largest) continue;
      const float next = to_float(T{static_cast<Bits>(bits + 1)});
      const auto middle = static_cast<float>((static_cast<double>(x) + next) / 2);
      if (middle == x || middle == next) continue;  // float32 has nothing between
      ASSERT_EQ(from_float<T>(middle).bits, bits + (bits & 1)) << x;
      ASSERT_EQ(from_float<T>(std::nextafter(middle, x)).bits, bits) << x;
      ASSERT_EQ(from_float<T>(std::nextafter(middle, next)).bits, bits + 1) << x;
    }
  }
}

TEST(Numbers, EveryValueAndTheMiddlesBetweenThem) {
  check_format<BFloat16>(8, 7, 0x7f7f);
  check_format<Float16>(5, 10, 0x7bff);
  check_format<Float8E4M3>(4, 3, 0x7e);
}

TEST(Numbers, OverflowAndNaN) {
  EXPECT_EQ(from_float<BFloat16>(kInfinity).bits, 0x7f80);
  EXPECT_EQ(from_float<BFloat16>(3.4e38f).bits, 0x7f80);
  EXPECT_EQ(from_float<BFloat16>(-kNaN).bits, 0x7fff);
  EXPECT_EQ(to_float(BFloat16{0xff80}), -kInfinity);
  EXPECT_TRUE(std::isnan(to_float(BFloat16{0x7fc1})));
  EXPECT_EQ(from_float<Float16>(65519.996f).bits, 0x7bff);
  EXPECT_EQ(from_float<Float16>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(from_float<Float16>(-kInfinity).bits, 0xfc00);
  EXPECT_EQ(from_float<Float16>(kNaN).bits, 0x7fff);
  EXPECT_EQ(to_float(Float16{0x7c00}), kInfinity);
  EXPECT_TRUE(std::isnan(to_float(Float16{0x7c01})));
  for (const float x : {448.0f, 449.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(from_float<Float8E4M3>(x).bits, 0x7e) << x;
    EXPECT_EQ(from_float<Float8E4M3>(-x).bits, 0xfe) << x;
  }
  EXPECT_EQ(from_float<Float8E4M3>(kNaN).bits, 0x7f);
  EXPECT_TRUE(std::isnan(to_float(Float8E4M3{0x7f})));
  EXPECT_TRUE(std::isnan(to_float(Float8E4M3{0xff})));
}

TEST(Numbers, PackPutsTheLowValueLow) {
  EXPECT_EQ(pack<BFloat16>(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(pack<Float16>(1.0f, -2.0f), 0xc0003c00u);
}

TEST(Numbers, ApproximationsHaveTheDevicesError) {
  double largest = 0;
  for (float x = -126.0f; x < 127.0f; x += 0.37f) {
    largest = std::max(largest, std::fabs(exp2_approx(x) / std::exp2(static_cast<double>(x)) - 1));
  }
  EXPECT_LT(largest, 0x1p-22);
  EXPECT_EQ(exp2_approx(-127.0f), 0.0f);
  EXPECT_EQ(exp2_approx(-kInfinity), 0.0f);
  EXPECT_EQ(exp2_approx(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(exp2_approx(kNaN)));
  largest = 0;
  for (float x = -9.0f; x < 9.0f; x += 0.0101f) {
    largest = std::max(largest, std::fabs(tanh_approx(x) - std::tanh(static_cast<double>(x))));
  }
  EXPECT_LT(largest, 0x1p-11);
  EXPECT_GT(largest, 0x1p-13);
  EXPECT_EQ(tanh_approx(kInfinity), 1.0f);
  EXPECT_TRUE(std::isnan(tanh_approx(kNaN)));
}

TEST(Numbers, Bits) {
  EXPECT_EQ(__popc(0xf0f0u), 8);
  EXPECT_EQ(__popcll(~0ull), 64);
  EXPECT_EQ(__clz(0), 32);
  EXPECT_EQ(__clz(-1), 0);
  EXPECT_EQ(__clzll(1), 63);
  EXPECT_EQ(__ffs(0), 0);
  EXPECT_EQ(__ffs(8), 4);
  EXPECT_EQ(__ffsll(1ll << 40), 41);
  EXPECT_EQ(__brev(0x1u), 0x80000000u);
  EXPECT_EQ(__brev(0x12345678u), 0x1e6a2c48u);
  EXPECT_EQ(__umulhi(0xffffffffu, 0xffffffffu), 0xfffffffeu);
  EXPECT_EQ(__mulhi(-1, 1), -1);
  EXPECT_EQ(__umul64hi(~0ull, ~0ull), ~0ull - 1);
  EXPECT_EQ(__float_as_uint(-0.0f), 0x80000000u);
  EXPECT_EQ(__float_as_int(1.0f), 0x3f800000);
  EXPECT_EQ(__int_as_float(0x3f800000), 1.0f);
  EXPECT_EQ(__uint_as_float(0x40000000u), 2.0f);
  EXPECT_EQ(__longlong_as_double(__double_as_longlong(-3.5)), -3.5);
}

TEST(Numbers, Conversions) {
  EXPECT_EQ(__float2int_rn(2.5f), 2);
  EXPECT_EQ(__float2int_rn(-3.5f), -4);
  EXPECT_EQ(__float2int_rn(kNaN), 0);
  EXPECT_EQ(__float2int_rn(1e20f), std::numeric_limits<int>::max());
  EXPECT_EQ(__float2int_rn(-kInfinity), std::numeric_limits<int>::min());
  EXPECT_EQ(__float2int_rz(-2.9f), -2);
  EXPECT_EQ(__float2int_rd(-2.1f), -3);
  EXPECT_EQ(__float2int_ru(2.1f), 3);
  EXPECT_EQ(__double2ll_rn(0x1p52 + 0.5), 1ll << 52);
  EXPECT_EQ(__double2ll_rn(1e30), std::numeric_limits<long long>::max());
  EXPECT_EQ(__int2float_rn((1 << 24) + 1), 0x1p24f);
}

TEST(Numbers, Arithmetic) {
  EXPECT_EQ(__fmaf_rn(1 + 0x1p-12f, 1 + 0x1p-12f, -1 - 0x1p-11f), 0x1p-24f);
  EXPECT_EQ(__fadd_rn(__fmul_rn(1 + 0x1p-12f, 1 + 0x1p-12f), -1 - 0x1p-11f), 0.0f);
  EXPECT_EQ(__fdiv_rn(1.0f, 3.0f), 1.0f / 3.0f);
  EXPECT_EQ(__dadd_rn(__dmul_rn(3.0, 2.0), __ddiv_rn(1.0, 4.0)), 6.25);
  EXPECT_EQ(rsqrtf(4.0f), 0.5f);
  EXPECT_FLOAT_EQ(__expf(1.0f), std::exp(1.0f));
  EXPECT_FLOAT_EQ(__logf(2.0f), std::log(2.0f));
  EXPECT_EQ(max(1.0f, kNaN), 1.0f);
  EXPECT_EQ(min(kNaN, 2.0f), 2.0f);
  EXPECT_EQ(max(-1, 2u), ~0u);
  EXPECT_EQ(min(3, 2ll), 2);
}

}  // namespace
