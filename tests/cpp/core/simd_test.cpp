// The vector layer of the CPU kernels, on every instruction set of this processor, against the
// standard library and plain loops.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/isa.h"
#include "simd_probe.h"

namespace vllm_lite {
namespace {

constexpr int kMaxWidth = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
using Lanes = float[kMaxWidth];

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
float from_bits(uint32_t x) { return std::bit_cast<float>(x); }

class SimdTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (GetParam() > best_isa()) GTEST_SKIP() << "not on this processor";
  }
  const SimdProbe& simd() const {
    switch (GetParam()) {
      case Isa::kAvx512:
        return avx512::kSimdProbe;
      case Isa::kAvx2:
        return avx2::kSimdProbe;
      default:
        return portable::kSimdProbe;
    }
  }
  // A vector function at one x, which stands in every lane.
  float at(void (*function)(const float*, float*), float x) const {
    Lanes in, out;
    for (float& lane : in) lane = x;
    function(in, out);
    for (int i = 1; i < simd().width; ++i) EXPECT_EQ(bits(out[i]), bits(out[0])) << x;
    return out[0];
  }
};

INSTANTIATE_TEST_SUITE_P(AllSets, SimdTest,
                         testing::Values(Isa::kPortable, Isa::kAvx2, Isa::kAvx512),
                         [](const auto& set) { return std::string(isa_name(set.param)); });

// ---- exponentials

// In units of the last place of the exact result.
double error_in_units(float result, double exact) {
  int exponent;
  std::frexp(exact, &exponent);
  return std::abs(result - exact) / std::ldexp(1.0, std::max(exponent, -125) - 24);
}

struct Worst {
  double units = 0;
  float x = 0;
};

// Largest error over every `stride`-th float of [from, to], both of one sign, by bits.
Worst largest_error(const SimdProbe& simd, void (*function)(const float*, float*),
                    double (*exact)(double), float from, float to, uint32_t stride) {
  Worst worst;
  const uint32_t last = bits(to);
  for (uint64_t x = bits(from); x <= last;) {
    Lanes in, out;
    for (int i = 0; i < simd.width; ++i, x += stride) {
      in[i] = from_bits(static_cast<uint32_t>(std::min<uint64_t>(x, last)));
    }
    function(in, out);
    for (int i = 0; i < simd.width; ++i) {
      const double error = error_in_units(out[i], exact(in[i]));
      if (!(error <= worst.units)) worst = {error, in[i]};
    }
  }
  return worst;
}

TEST_P(SimdTest, ExpIsWithinTwoUnitsInTheLastPlace) {
  // 1 + x for tiny x; then all that has a normal, finite result.
  for (const auto& [from, to] : {std::pair{0.0f, 88.72f}, {-0.0f, -87.336f}}) {
    const Worst worst = largest_error(simd(), simd().exp, std::exp, from, to, 1009);
    EXPECT_LE(worst.units, 2.0) << "at " << worst.x;
  }
}

TEST_P(SimdTest, ExpAtItsEnds) {
  EXPECT_EQ(at(simd().exp, 0.0f), 1.0f);
  EXPECT_EQ(at(simd().exp, -0.0f), 1.0f);
  EXPECT_LT(at(simd().exp, 88.72f), kInfinity);
  EXPECT_EQ(at(simd().exp, 88.73f), kInfinity);
  EXPECT_EQ(at(simd().exp, 1e30f), kInfinity);
  EXPECT_EQ(at(simd().exp, kInfinity), kInfinity);
  EXPECT_GE(at(simd().exp, -87.3365f), std::numeric_limits<float>::min());
  EXPECT_EQ(at(simd().exp, -87.337f), 0.0f);  // would be subnormal
  EXPECT_EQ(at(simd().exp, -1e30f), 0.0f);
  EXPECT_EQ(at(simd().exp, -kInfinity), 0.0f);
  EXPECT_TRUE(std::isnan(at(simd().exp, kNan)));
}

TEST_P(SimdTest, ExpOfOneFloatHasTheBitsOfALane) {
  for (float x : {0.0f, -0.3f, 1.0f, -17.25f, 88.0f, -87.0f, -100.0f, kInfinity}) {
    EXPECT_EQ(bits(simd().exp_one(x)), bits(at(simd().exp, x))) << x;
  }
}

TEST_P(SimdTest, TanhIsWithinThreeUnitsInTheLastPlaceAlsoForSmallX) {
  for (const float sign : {1.0f, -1.0f}) {
    const Worst worst = largest_error(simd(), simd().tanh, std::tanh,
                                      sign * std::numeric_limits<float>::min(), sign * 100, 1009);
    EXPECT_LE(worst.units, 3.0) << "at " << worst.x;
  }
}

TEST_P(SimdTest, TanhAtItsEnds) {
  EXPECT_EQ(bits(at(simd().tanh, 0.0f)), bits(0.0f));
  EXPECT_EQ(bits(at(simd().tanh, -0.0f)), bits(-0.0f));
  EXPECT_EQ(at(simd().tanh, 1e30f), 1.0f);
  EXPECT_EQ(at(simd().tanh, kInfinity), 1.0f);
  EXPECT_EQ(at(simd().tanh, -kInfinity), -1.0f);
  EXPECT_TRUE(std::isnan(at(simd().tanh, kNan)));
}

// ---- 16-bit numbers

struct HalfFormat {
  const char* name;
  StorageProbe<uint16_t> SimdProbe::* probe;
  int mantissa_bits;
  int min_exponent;  // of a normal number
  double largest;

  double value(uint16_t half) const {
    const int mantissa = half & ((1 << mantissa_bits) - 1);
    const int exponent = (half & 0x7fff) >> mantissa_bits;
    const double sign = half & 0x8000 ? -1.0 : 1.0;
    if (exponent == 0) return sign * std::ldexp(mantissa, min_exponent - mantissa_bits);
    if (exponent == (1 << (15 - mantissa_bits)) - 1) {
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                           : sign * std::numeric_limits<double>::infinity();
    }
    return sign *
           std::ldexp((1 << mantissa_bits) + mantissa, min_exponent + exponent - 1 - mantissa_bits);
  }

  // The nearest number, ties to even; nearbyint rounds so.
  double rounded(float x) const {
    if (x == 0 || !std::isfinite(x)) return x;
    const int unit = std::max(std::ilogb(x), min_exponent) - mantissa_bits;
    const double nearest = std::ldexp(std::nearbyint(std::ldexp(double{x}, -unit)), unit);
    return std::abs(nearest) <= largest ? nearest
                                        : std::copysign(std::numeric_limits<double>::infinity(), x);
  }
};

const HalfFormat kHalfFormats[] = {
    {"bfloat16", &SimdProbe::bfloat16, 7, -126, 0x1.fep127},
    {"float16", &SimdProbe::float16, 10, -14, 65504.0},
};

bool same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

TEST_P(SimdTest, EveryHalfIsReadExactlyAndWrittenBack) {
  for (const HalfFormat& format : kHalfFormats) {
    SCOPED_TRACE(format.name);
    const StorageProbe<uint16_t>& probe = simd().*format.probe;
    for (uint32_t begin = 0; begin < 0x10000; begin += simd().width) {
      uint16_t halves[kMaxWidth], back[kMaxWidth];
      for (int i = 0; i < simd().width; ++i) halves[i] = static_cast<uint16_t>(begin + i);
      Lanes floats;
      probe.load(halves, floats);
      probe.store(floats, back);
      for (int i = 0; i < simd().width; ++i) {
        const double expected = format.value(halves[i]);
        ASSERT_TRUE(same(floats[i], expected)) << halves[i];
        ASSERT_TRUE(same(probe.to_float(halves[i]), expected)) << halves[i];
        for (uint16_t written : {back[i], probe.from_float(floats[i])}) {
          if (std::isnan(expected)) {
            // Its payload may change, not what it is.
            ASSERT_TRUE(std::isnan(format.value(written))) << halves[i];
            ASSERT_EQ(written & 0x8000, halves[i] & 0x8000);
          } else {
            ASSERT_EQ(written, halves[i]);
          }
        }
      }
    }
  }
}

TEST_P(SimdTest, FloatsRoundToTheNearestHalfTiesToEven) {
  std::vector<float> floats = {kInfinity, std::numeric_limits<float>::max(), 0x1.fep127f};
  for (float x : {65519.99f, 65520.0f, 0x1.ffp127f, 0x1p-24f, 0x1p-25f, from_bits(1)}) {
    floats.push_back(x);
  }
  // NaNs whose payload is all in the bits that are cut off, and others.
  for (uint32_t nan : {0x7f800001u, 0x7f801000u, 0x7f80ffffu, 0x7fbfffffu, 0x7fffffffu}) {
    floats.push_back(from_bits(nan));
  }
  // The middle between two halves and its neighbours, over all exponents.
  for (const HalfFormat& format : kHalfFormats) {
    for (uint16_t half = 0; half < 0x7f00; half += 61) {
      const float middle = static_cast<float>((format.value(half) + format.value(half + 1)) / 2);
      for (float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInfinity)}) {
        if (std::isfinite(x)) floats.push_back(x);
      }
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100'000; ++i) floats.push_back(from_bits(random() & 0x7fffffff));
  while (floats.size() % kMaxWidth != 0) floats.push_back(0.0f);
  for (const HalfFormat& format : kHalfFormats) {
    SCOPED_TRACE(format.name);
    const StorageProbe<uint16_t>& probe = simd().*format.probe;
    for (const uint32_t sign : {0u, 0x80000000u}) {
      for (size_t begin = 0; begin < floats.size(); begin += static_cast<size_t>(simd().width)) {
        Lanes in;
        uint16_t halves[kMaxWidth];
        for (int i = 0; i < simd().width; ++i)
          in[i] = from_bits(bits(floats[begin + i]) | sign);  // arithmetic would quiet a NaN
        probe.store(in, halves);
        for (int i = 0; i < simd().width; ++i) {
          const double expected = format.rounded(in[i]);
          ASSERT_TRUE(same(format.value(halves[i]), expected)) << in[i] << " " << bits(in[i]);
          ASSERT_TRUE(same(format.value(probe.from_float(in[i])), expected)) << in[i];
        }
      }
    }
  }
}

TEST_P(SimdTest, PairsOfHalvesWidenByPlace) {
  const int width = simd().width;
  for (uint32_t begin = 0; begin < 0x10000; begin += 2 * width) {
    uint16_t halves[2 * kMaxWidth];
    for (int i = 0; i < 2 * width; ++i) halves[i] = static_cast<uint16_t>(begin + i);
    for (const HalfFormat& format : kHalfFormats) {
      Lanes lower, upper;
      const bool bfloat16 = format.probe == &SimdProbe::bfloat16;
      (bfloat16 ? simd().widen_bfloat16 : simd().widen_float16)(halves, lower, upper);
      for (int i = 0; i < width; ++i) {
        ASSERT_TRUE(same(lower[i], format.value(halves[2 * i]))) << format.name << halves[2 * i];
        ASSERT_TRUE(same(upper[i], format.value(halves[2 * i + 1]))) << format.name;
      }
    }
  }
}

// ---- partial vectors

// Pages of memory between two that cannot be touched: an access beyond ends the program.
class GuardedPage {
 public:
  GuardedPage() : size_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    void* pages = mmap(nullptr, 3 * size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<char*>(pages) + size_;
    if (mprotect(begin_, size_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  }
  ~GuardedPage() { munmap(begin_ - size_, 3 * size_); }
  GuardedPage(const GuardedPage&) = delete;
  GuardedPage& operator=(const GuardedPage&) = delete;
  char* begin() { return begin_; }
  char* end() { return begin_ + size_; }

 private:
  size_t size_;
  char* begin_;
};

template <typename Storage>
void check_partial(const SimdProbe& simd, const StorageProbe<Storage>& probe) {
  GuardedPage page;
  Lanes values;
  for (int i = 0; i < kMaxWidth; ++i) values[i] = 1.5f + static_cast<float>(i);
  Storage stored[kMaxWidth];
  probe.store(values, stored);
  for (int count = 0; count <= simd.width; ++count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(Storage);
    // At either end of the page: nothing before the first or after the last element is touched.
    for (char* place : {page.begin(), page.end() - bytes}) {
      SCOPED_TRACE(count);
      std::memcpy(place, stored, bytes);
      Lanes loaded;
      probe.load_partial(reinterpret_cast<const Storage*>(place), count, loaded);
      for (int i = 0; i < simd.width; ++i) {
        EXPECT_EQ(bits(loaded[i]), bits(i < count ? values[i] : 0.0f)) << i;
      }
      std::memset(page.begin(), 0xa5, static_cast<size_t>(page.end() - page.begin()));
      probe.store_partial(values, count, reinterpret_cast<Storage*>(place));
      EXPECT_EQ(std::memcmp(place, stored, bytes), 0);
      for (const char* p = page.begin(); p < page.end(); ++p) {
        if (p < place || p >= place + bytes) {
          ASSERT_EQ(*p, '\xa5') << "byte " << p - place << " of " << bytes;
        }
      }
    }
  }
}

TEST_P(SimdTest, PartialLoadsAndStoresTouchTheirElementsOnly) {
  {
    SCOPED_TRACE("float32");
    check_partial(simd(), simd().float32);
  }
  {
    SCOPED_TRACE("bfloat16");
    check_partial(simd(), simd().bfloat16);
  }
  {
    SCOPED_TRACE("float16");
    check_partial(simd(), simd().float16);
  }
}

// ---- across lanes and per lane

TEST_P(SimdTest, ReduceAddFoldsHalvesInOneOrder) {
  const int width = simd().width;
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  int differs_from_left_to_right = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    Lanes in, folded;
    float left_to_right = 0;
    for (int i = 0; i < width; ++i) {
      in[i] = std::ldexp(normal(random), static_cast<int>(random() % 20));
      folded[i] = in[i];
      left_to_right += in[i];
    }
    for (int half = width / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) folded[i] += folded[i + half];
    }
    EXPECT_EQ(bits(simd().reduce_add(in)), bits(folded[0]));
    differs_from_left_to_right += left_to_right != folded[0];
  }
  EXPECT_GT(differs_from_left_to_right, 100);  // else the order would not show
}

TEST_P(SimdTest, ReduceMaxFindsTheLargestInAnyLane) {
  const int width = simd().width;
  for (int place = 0; place < width; ++place) {
    Lanes in;
    for (int i = 0; i < width; ++i) in[i] = i % 3 == 0 ? -kInfinity : -static_cast<float>(i + 2);
    in[place] = -1.0f;
    EXPECT_EQ(simd().reduce_max(in), -1.0f) << place;
  }
}

TEST_P(SimdTest, FmaRoundsOnceWhereTheProcessorHasItAndAlikeInVectorAndScalar) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  int fused_differs = 0;
  for (int trial = 0; trial < 200; ++trial) {
    Lanes a, b, c, out;
    for (int i = 0; i < simd().width; ++i) {
      a[i] = normal(random);
      b[i] = normal(random);
      c[i] = -a[i] * b[i];  // cancels, so that the rounding of the product shows
    }
    simd().fma(a, b, c, out);
    for (int i = 0; i < simd().width; ++i) {
      volatile float product = a[i] * b[i];
      const float fused = std::fma(a[i], b[i], c[i]), plain = product + c[i];
      EXPECT_EQ(bits(out[i]), bits(GetParam() == Isa::kPortable ? plain : fused));
      EXPECT_EQ(bits(simd().fma_one(a[i], b[i], c[i])), bits(out[i]));
      fused_differs += fused != plain;
    }
  }
  EXPECT_GT(fused_differs, 100);
}

TEST_P(SimdTest, MaxAndMinGiveTheSecondWhereEitherIsNan) {
  const Lanes a = {1, 2, kNan, -kInfinity, 1, 2, kNan, -kInfinity, 1, 2, kNan, 5, 1, 2, kNan, 5};
  const Lanes b = {2, kNan, 3, kInfinity, 2, kNan, 3, kInfinity, 2, kNan, 3, 4, 2, kNan, 3, 4};
  Lanes largest, smallest;
  simd().max(a, b, largest);
  simd().min(a, b, smallest);
  for (int i = 0; i < simd().width; ++i) {
    EXPECT_TRUE(same(largest[i], a[i] > b[i] ? a[i] : b[i])) << i;
    EXPECT_TRUE(same(smallest[i], a[i] < b[i] ? a[i] : b[i])) << i;
  }
}

TEST_P(SimdTest, SqrtIsCorrectlyRounded) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 1000; ++trial) {
    const float x = from_bits(random() & 0x7f7fffff);
    EXPECT_EQ(bits(at(simd().sqrt, x)), bits(std::sqrt(x))) << x;
  }
  EXPECT_TRUE(std::isnan(at(simd().sqrt, -1.0f)));
}

}  // namespace
}  // namespace vllm_lite
