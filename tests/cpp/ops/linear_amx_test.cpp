// The AMX kernel of linear with its tile instructions in software: right on a machine without AMX.
// Where there is AMX, the Python tests run the kernel itself.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../core/numbers.h"
#include "core/isa.h"
#include "ops/linear_kernels.h"

namespace vllm_lite {
namespace amx_on_host_kernels {
extern const LinearKernels kLinearKernels;  // linear_amx_on_host.cpp
}
namespace {

using amx_on_host_kernels::kLinearKernels;

struct Shape {
  int64_t num_tokens, rows, columns;
};

class LinearAmxTest : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    if (best_isa() < Isa::kAvx512Bf16) GTEST_SKIP() << "needs AVX-512-BF16";
  }
};

struct Problem {
  Shape shape;
  std::vector<uint16_t> input, weight;
  std::vector<uint8_t> memory;
  uint8_t* packed;

  explicit Problem(Shape s) : shape(s) {
    Random random(static_cast<uint32_t>(s.num_tokens * 7 + s.rows * 3 + s.columns));
    input = random.bfloat16s(static_cast<size_t>(s.num_tokens * s.columns));
    weight = random.bfloat16s(static_cast<size_t>(s.rows * s.columns));
    constexpr WeightFormat kFormat = WeightFormat::kBFloat16;
    const int64_t bytes = packed_weight_bytes(kFormat, s.rows, s.columns);
    memory.resize(static_cast<size_t>(bytes + 63));
    packed = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
    pack_weight_cpu({packed, weight.data(), nullptr, kFormat, s.rows, s.columns, 0, s.rows});
  }

  // out of tokens [first, first + count), by the kernel. The input's rows are read where they are
  // if they are of whole blocks.
  template <typename T>
  std::vector<T> multiply(int64_t first, int64_t count, DType out_dtype, const void* bias = nullptr,
                          bool is_gated = false) const {
    const int64_t blocks = num_column_blocks(shape.columns);
    LinearCall call{};
    call.prepared = input.data() + first * shape.columns;
    call.prepared_stride = blocks * kBlockColumns;
    call.prepared_tokens = count;
    std::vector<uint16_t> prepared(static_cast<size_t>(count * call.prepared_stride));
    if (call.prepared_stride != shape.columns) {
      LinearInput in{};
      in.prepared = prepared.data();
      in.input = call.prepared;
      in.input_stride = in.columns = shape.columns;
      in.num_tokens = in.prepared_tokens = count;
      in.dtype = DType::kBFloat16;
      kLinearKernels.prepare(in, 0, count);
      call.prepared = prepared.data();
    }
    call.rows = call.out_stride = is_gated ? shape.rows / 2 : shape.rows;
    call.columns = shape.columns;
    call.format = WeightFormat::kBFloat16;
    call.packed = packed;
    call.bias = bias;
    call.is_gated = is_gated;
    call.out_dtype = out_dtype;
    constexpr T kUnwritten = static_cast<T>(12345);
    std::vector<T> out(static_cast<size_t>(count * call.rows), kUnwritten);
    call.out = out.data();
    std::vector<float> sums(kTurnGroups * kRangeTokens * kGroupRows, NAN);
    LinearRange range{};
    range.num_tokens = count;
    range.num_panels = num_panels(call.rows);
    range.sums = sums.data();
    kLinearKernels.multiply(call, range);
    return out;
  }
  std::vector<float> multiply(int64_t first, int64_t count) const {
    return multiply<float>(first, count, DType::kFloat32);
  }

  double exact(int64_t token, int64_t row) const {
    double sum = 0;
    for (int64_t c = 0; c < shape.columns; ++c) {
      const uint16_t x = input[static_cast<size_t>(token * shape.columns + c)];
      const uint16_t w = weight[static_cast<size_t>(row * shape.columns + c)];
      sum += double{widen(x)} * double{widen(w)};
    }
    return sum;
  }
};

TEST_P(LinearAmxTest, IsTheProduct) {
  const Problem problem(GetParam());
  const auto [num_tokens, rows, columns] = problem.shape;
  const std::vector<float> out = problem.multiply(0, num_tokens);
  const double tolerance = 4.0 * std::ldexp(static_cast<double>(columns), -24) + 1e-6;
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t row = 0; row < rows; ++row) {
      const float value = out[static_cast<size_t>(token * rows + row)];
      ASSERT_NEAR(value, problem.exact(token, row), tolerance) << token << " " << row;
    }
  }
}

TEST_P(LinearAmxTest, GivesATokenTheSameBitsAlone) {
  const Problem problem(GetParam());
  const auto [num_tokens, rows, columns] = problem.shape;
  const std::vector<float> together = problem.multiply(0, num_tokens);
  for (int64_t token : {int64_t{0}, num_tokens / 2, num_tokens - 1}) {
    const std::vector<float> alone = problem.multiply(token, 1);
    const size_t bytes = static_cast<size_t>(rows) * sizeof(float);
    EXPECT_EQ(std::memcmp(alone.data(), together.data() + token * rows, bytes), 0) << token;
  }
}

TEST_P(LinearAmxTest, WritesTheSumsAndTheBiasAsBFloat16) {
  const Problem problem(GetParam());
  const auto [num_tokens, rows, columns] = problem.shape;
  const std::vector<float> sums = problem.multiply(0, num_tokens);
  Random random(3);
  const std::vector<uint16_t> bias = random.bfloat16s(static_cast<size_t>(rows));
  const auto out = problem.multiply<uint16_t>(0, num_tokens, DType::kBFloat16, bias.data());
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t row = i % static_cast<size_t>(rows);
    ASSERT_EQ(out[i], narrow(sums[i] + widen(bias[row]))) << i;
  }
}

TEST_P(LinearAmxTest, MultipliesTheGateByTheOther) {
  const Problem problem(GetParam());
  const auto [num_tokens, rows, columns] = problem.shape;
  if (rows % (2 * kPanelRows) != 0) GTEST_SKIP() << "half the rows are no whole panels";
  Random random(3);
  const std::vector<uint16_t> bias = random.bfloat16s(static_cast<size_t>(rows));
  const auto both = problem.multiply<uint16_t>(0, num_tokens, DType::kBFloat16, bias.data());
  const auto out = problem.multiply<uint16_t>(0, num_tokens, DType::kBFloat16, bias.data(), true);
  const size_t size = static_cast<size_t>(rows) / 2;
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t at = i / size * 2 * size + i % size;
    const double gate = widen(both[at]), up = widen(both[at + size]);
    const double expected = gate / (1 + std::exp(-gate)) * up;
    ASSERT_NEAR(widen(out[i]), expected, std::ldexp(std::abs(expected), -8) + 1e-30) << i;
  }
}

// Tokens around tiles of 16 and 32; rows around panels of 16, pairs and groups of them; columns
// around tiles of 32; with 192 tokens two passes, of one group and of three.
INSTANTIATE_TEST_SUITE_P(Shapes, LinearAmxTest,
                         testing::Values(Shape{1, 64, 64}, Shape{15, 16, 32}, Shape{16, 17, 96},
                                         Shape{17, 33, 50}, Shape{31, 70, 256}, Shape{32, 64, 1024},
                                         Shape{33, 130, 160}, Shape{48, 49, 77}, Shape{49, 96, 96},
                                         Shape{100, 192, 64}, Shape{192, 48, 2080},
                                         Shape{192, 160, 2080}),
                         [](const auto& test) {
                           const Shape& s = test.param;
                           return std::to_string(s.num_tokens) + "x" + std::to_string(s.rows) +
                                  "x" + std::to_string(s.columns);
                         });

}  // namespace
}  // namespace vllm_lite
