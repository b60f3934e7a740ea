// Packed products on the CPU: bytes of weight per second at few tokens, FLOP/s at many, for every
// format and instruction set, beside the rate at which the machine reads memory (read_memory).
//
// A weight is laid out as often as it takes to be larger than the caches, in huge pages, and each
// product reads the next copy: what a decode step does. --threads=N (1), --bytes=N of all copies.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/isa.h"
#include "core/parallel_for.h"
#include "core/thread_pool.h"
#include "ops/linear.h"

namespace vllm_lite {
namespace {

int num_threads = 1;
int64_t buffer_bytes = int64_t{512} << 20;

// Memory in huge pages, mapped once and shared by all benchmarks.
uint8_t* weights_memory() {
  static uint8_t* const memory = [] {
    const auto size = static_cast<size_t>(buffer_bytes);
    void* const mapped =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    madvise(mapped, size, MADV_HUGEPAGE);
    std::memset(mapped, 1, size);
    return static_cast<uint8_t*>(mapped);
  }();
  return memory;
}

void read_memory(benchmark::State& state) {
  const uint8_t* const memory = weights_memory();
  constexpr int64_t kAhead = 1024, kLine = 8, kLines = 4;  // words
  for (auto _ : state) {
    parallel_for(num_threads, 1, [&](int64_t begin, int64_t end) {
      const int64_t each = buffer_bytes / num_threads / 8;
      const auto* from = reinterpret_cast<const uint64_t*>(memory) + begin * each;
      uint64_t sums[kLines * kLine] = {};
      for (int64_t i = 0; i < (end - begin) * each; i += kLines * kLine) {
        for (int64_t line = 0; line < kLines; ++line) {
          __builtin_prefetch(from + i + kAhead + line * kLine, 0, 2);
        }
        for (int64_t j = 0; j < kLines * kLine; ++j) sums[j] += from[i + j];
      }
      benchmark::DoNotOptimize(sums);
    });
  }
  state.SetBytesProcessed(state.iterations() * buffer_bytes);
}

struct Shape {
  const char* name;
  int64_t rows, columns;
};
constexpr Shape kShapes[] = {
    {"smollm2_qkv", 960, 576},   {"smollm2_out", 576, 576},    {"smollm2_gate_up", 3072, 576},
    {"smollm2_down", 576, 1536}, {"smollm2_head", 49152, 576}, {"4096", 4096, 4096},
};
struct Format {
  const char* name;
  WeightFormat format;
  int64_t block;
};
constexpr Format kFormats[] = {
    {"float32", WeightFormat::kFloat32, 1}, {"bfloat16", WeightFormat::kBFloat16, 1},
    {"float16", WeightFormat::kFloat16, 1}, {"int8", WeightFormat::kInt8, 1},
    {"Q4_0", WeightFormat::kQ4_0, 32},      {"Q4_1", WeightFormat::kQ4_1, 32},
    {"Q8_0", WeightFormat::kQ8_0, 32},      {"Q4_K", WeightFormat::kQ4_K, 256},
    {"Q5_K", WeightFormat::kQ5_K, 256},     {"Q6_K", WeightFormat::kQ6_K, 256},
};

void multiply(benchmark::State& state, Isa isa, Format format, Shape shape) {
  set_isa(isa);
  const int64_t tokens = state.range(0);
  const int64_t bytes = packed_weight_bytes(format.format, shape.rows, shape.columns);
  const int64_t copies = std::max<int64_t>(1, buffer_bytes / (bytes + 64));
  const int64_t stride = (bytes + 63) / 64 * 64;
  // Bytes of 1 are small numbers in every format.
  uint8_t* const weights = weights_memory();

  std::mt19937 random(1);
  std::vector<uint16_t> input(static_cast<size_t>(tokens * shape.columns));
  for (uint16_t& x : input) x = static_cast<uint16_t>(0x3f00 + random() % 256);
  std::vector<uint16_t> out(static_cast<size_t>(tokens * shape.rows));
  LinearParams params{};
  params.out = out.data();
  params.input = input.data();
  params.format = format.format;
  params.num_tokens = tokens;
  params.rows = params.out_stride = shape.rows;
  params.columns = params.input_stride = shape.columns;
  params.dtype = params.out_dtype = DType::kBFloat16;
  int64_t copy = 0;
  for (auto _ : state) {
    params.packed = weights + copy * stride;
    linear_cpu(params);
    copy = (copy + 1) % copies;
  }
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["FLOP/s"] =
      benchmark::Counter(static_cast<double>(2 * tokens * shape.rows * shape.columns),
                         benchmark::Counter::kIsIterationInvariantRate);
}

void register_all() {
  benchmark::RegisterBenchmark("read_memory", read_memory)->UseRealTime();
  for (int32_t i = 0; i <= static_cast<int32_t>(best_isa()); ++i) {
    const Isa isa = static_cast<Isa>(i);
    for (const Format& format : kFormats) {
      for (const Shape& shape : kShapes) {
        if (shape.columns % format.block != 0) continue;
        const std::string name = std::string(isa_name(isa)) + "/" + format.name + "/" + shape.name;
        auto* bench = benchmark::RegisterBenchmark(
            name.c_str(), [=](benchmark::State& state) { multiply(state, isa, format, shape); });
        for (int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 128, 512}) bench->Arg(tokens);
        bench->UseRealTime();
      }
    }
  }
}

}  // namespace
}  // namespace vllm_lite

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.starts_with("--threads=")) vllm_lite::num_threads = std::stoi(arg.substr(10));
    if (arg.starts_with("--bytes=")) vllm_lite::buffer_bytes = std::stoll(arg.substr(8));
  }
  vllm_lite::set_num_threads(vllm_lite::num_threads);
  vllm_lite::register_all();
  benchmark::RunSpecifiedBenchmarks();
}
