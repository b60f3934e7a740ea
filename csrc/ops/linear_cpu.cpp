#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "core/check.h"
#include "core/isa.h"
#include "core/parallel_for.h"
#include "ops/linear.h"
#include "ops/linear_kernels.h"

namespace vllm_lite {
namespace {

// Tokens whose input is prepared at a time: bounds the scratch. A multiple of kRangeTokens.
constexpr int64_t kSlabTokens = 4 * kRangeTokens;
// Of tokens that do not fit one range, how many ranges are made of: every kernel's tile divides it.
constexpr int64_t kRangeStep = 48;
// Bytes of weight, and multiply-adds, that are worth a thread's while.
constexpr int64_t kTaskBytes = 64 << 10;
constexpr int64_t kTaskProducts = 512 << 10;
constexpr int64_t kTaskInputBytes = 64 << 10;
// Up to so many tokens memory is the bound, and a panel is a thread's smallest stripe; above, a
// group of panels, which takes no longer than a part of it would.
constexpr int64_t kFewTokens = 4;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory of one thread. It grows to what is asked for and stays.
class Scratch {
 public:
  void* at_least(int64_t bytes) {
    constexpr int64_t kAlignment = 64;
    if (bytes > size_) {
      size_ = 0;
      const auto rounded = static_cast<size_t>(divide_up(bytes, kAlignment) * kAlignment);
      memory_.reset(std::aligned_alloc(kAlignment, rounded));
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t size_ = 0;
};
thread_local Scratch input_scratch;
thread_local Scratch range_scratch;

// Whether a call multiplies integers: the input has to be rounded to 16 bits.
bool uses_integers(const LinearParams& p) {
  return is_quantised(p.format) && p.dtype != DType::kFloat32;
}

// The one kernel of an instruction set, a format and an input's dtype.
const LinearKernels& choose_kernels(const LinearParams& p) {
  const Isa isa = current_isa();
  const bool is_bfloat16 = p.dtype == DType::kBFloat16 && p.format == WeightFormat::kBFloat16;
  if (isa == Isa::kAmx && is_bfloat16) return amx::kLinearKernels;
  if (isa >= Isa::kAvx512Bf16 && (is_bfloat16 || uses_integers(p))) {
    return avx512_bf16::kLinearKernels;
  }
  if (isa >= Isa::kAvx512) return avx512::kLinearKernels;
  return isa == Isa::kAvx2 ? avx2::kLinearKernels : portable::kLinearKernels;
}

void check_params(const LinearParams& p) {
  const auto check_at_least = [](const char* name, int64_t value, int64_t least) {
    VL_CHECK(value >= least, "linear: " + std::string(name) + " is " + std::to_string(value) +
                                 ", must be at least " + std::to_string(least));
  };
  check_at_least("num_tokens", p.num_tokens, 0);
  packed_weight_bytes(p.format, p.rows, p.columns);
  if (p.num_tokens > 1) {
    check_at_least("out_stride", p.out_stride, p.rows);
    check_at_least("input_stride", p.input_stride, p.columns);
  }
  VL_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
           "linear: the input must be float32, bfloat16 or float16");
  VL_CHECK(!p.is_gated || p.rows % kPanelRows == 0,
           "linear: gated, it has " + std::to_string(p.rows) + " rows, must have a multiple of " +
               std::to_string(kPanelRows));
  VL_CHECK(p.out_dtype == p.dtype || p.out_dtype == DType::kFloat32,
           "linear: out must have the input's dtype or float32");
}

// The tokens of one slab: [first, first + num_tokens) of the call's.
class Slab {
 public:
  Slab(const LinearParams& params, const LinearKernels& kernels, int64_t first, int64_t num_tokens)
      : params_(params), kernels_(kernels), first_(first), num_tokens_(num_tokens) {}

  void run() {
    prepare_input();
    multiply();
  }

 private:
  static const void* advance(const void* p, int64_t elements, DType dtype) {
    return static_cast<const uint8_t*>(p) + elements * (dtype == DType::kFloat32 ? 4 : 2);
  }

  void prepare_input() {
    const int64_t num_blocks = num_column_blocks(params_.columns);
    call_.prepared_stride = num_blocks * kBlockColumns;
    if (kernels_.reads_rows && params_.columns == call_.prepared_stride) {
      call_.prepared = advance(params_.input, first_ * params_.input_stride, params_.dtype);
      call_.prepared_stride = params_.input_stride;
      call_.prepared_tokens = num_tokens_;
      return;
    }
    const int64_t prepared_tokens = kernels_.padded_tokens(num_tokens_);
    const bool integers = uses_integers(params_);
    const int64_t element_bytes =
        integers ? static_cast<int64_t>(sizeof(int16_t)) : kernels_.element_bytes;
    const int64_t prepared_bytes = prepared_tokens * num_blocks * kBlockColumns * element_bytes;
    const int64_t num_scales = integers ? prepared_tokens * num_blocks : 0;
    const int64_t num_sums = has_minimum(params_.format) ? prepared_tokens * num_blocks : 0;
    uint8_t* const scratch =
        static_cast<uint8_t*>(input_scratch.at_least(prepared_bytes + (num_scales + num_sums) * 4));
    auto* const scales = reinterpret_cast<float*>(scratch + prepared_bytes);

    LinearInput input{};
    input.prepared = scratch;
    input.scales = num_scales ? scales : nullptr;
    input.block_sums = num_sums ? scales + num_scales : nullptr;
    input.input = advance(params_.input, first_ * params_.input_stride, params_.dtype);
    input.input_stride = params_.input_stride;
    input.columns = params_.columns;
    input.num_tokens = num_tokens_;
    input.prepared_tokens = prepared_tokens;
    input.dtype = params_.dtype;
    parallel_for(prepared_tokens, divide_up(kTaskInputBytes, params_.columns * 4),
                 [&](int64_t begin, int64_t end) { kernels_.prepare(input, begin, end); });

    call_.prepared = input.prepared;
    call_.input_scales = input.scales;
    call_.block_sums = input.block_sums;
    call_.prepared_tokens = prepared_tokens;
  }

  // Stripes of the weight times ranges of the tokens, range after range, so that a thread's stripes
  // are neighbours in memory. The stripes of a single range come in parts, the smallest of which a
  // thread takes at the end, so that all end together; who takes several of a stripe reads it once.
  void multiply() {
    call_.out =
        const_cast<void*>(advance(params_.out, first_ * params_.out_stride, params_.out_dtype));
    call_.packed = params_.packed;
    call_.bias = params_.bias;
    call_.format = params_.format;
    call_.out_dtype = params_.out_dtype;
    call_.rows = params_.rows;
    call_.columns = params_.columns;
    call_.out_stride = params_.out_stride;
    call_.is_gated = params_.is_gated;

    const int64_t panels = num_panels(params_.rows);
    const int64_t panels_each = params_.is_gated ? 2 : 1;  // of the weight, for one of out
    const int64_t stripe_panels = num_tokens_ <= kFewTokens ? 1 : kGroupPanels / panels_each;
    const int64_t stripes = divide_up(panels, stripe_panels);
    const int64_t num_ranges = divide_up(num_tokens_, kRangeTokens);
    const int64_t parts = num_ranges == 1 ? divide_up(num_tokens_, kernels_.part_tokens) : 1;
    const int64_t part_tokens =
        num_ranges == 1 ? kernels_.part_tokens
                        : divide_up(divide_up(num_tokens_, num_ranges), kRangeStep) * kRangeStep;
    const int64_t weight_panels = stripe_panels * panels_each;
    const int64_t grain = std::min(
        divide_up(kTaskBytes, weight_panels * panel_bytes(params_.format, params_.columns)),
        divide_up(kTaskProducts, std::min(part_tokens, num_tokens_) * params_.columns *
                                     weight_panels * kPanelRows));
    parallel_for(num_ranges * stripes * parts, grain, [&](int64_t begin, int64_t end) {
      constexpr int64_t kSumsBytes = kTurnGroups * kRangeTokens * kGroupRows * 4;
      constexpr int64_t kWidenedBytes = kGroupPanels * kPassBlocks * kWidenedBlockBytes;
      auto* const scratch =
          static_cast<uint8_t*>(range_scratch.at_least(kSumsBytes + kWidenedBytes));
      for (int64_t item = begin; item < end;) {
        const int64_t stripe = item / parts % stripes, part = item % parts;
        // Whole stripes, or some parts of one.
        int64_t num_stripes = 1, num_parts = std::min(parts - part, end - item);
        if (num_parts == parts) num_stripes = std::min((end - item) / parts, stripes - stripe);
        LinearRange range{};
        range.first_panel = stripe * stripe_panels;
        range.num_panels = std::min(num_stripes * stripe_panels, panels - range.first_panel);
        range.first_token = (item / (stripes * parts) + part) * part_tokens;
        range.num_tokens = std::min(num_parts * part_tokens, num_tokens_ - range.first_token);
        range.sums = reinterpret_cast<float*>(scratch);
        range.widened = scratch + kSumsBytes;
        if (range.num_tokens > 0) kernels_.multiply(call_, range);
        item += num_stripes * num_parts;
      }
    });
  }

  const LinearParams& params_;
  const LinearKernels& kernels_;
  const int64_t first_, num_tokens_;
  LinearCall call_{};
};

}  // namespace

void linear_cpu(const LinearParams& params) {
  check_params(params);
  const LinearKernels& kernels = choose_kernels(params);
  for (int64_t first = 0; first < params.num_tokens; first += kSlabTokens) {
    Slab(params, kernels, first, std::min(kSlabTokens, params.num_tokens - first)).run();
  }
}

}  // namespace vllm_lite
