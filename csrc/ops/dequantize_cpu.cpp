#include <string>

#include "core/check.h"
#include "ops/ops.h"

namespace vllm_lite {
namespace {

struct BlockFormat {
  int64_t elements;
  int64_t bytes;
};

BlockFormat block_format(GgmlType type) {
  switch (type) {
    case GgmlType::kF32:
      return {1, 4};
    case GgmlType::kF16:
      return {1, 2};
    case GgmlType::kBF16:
      return {1, 2};
    case GgmlType::kQ4_0:
      return {32, 18};
    case GgmlType::kQ4_1:
      return {32, 20};
    case GgmlType::kQ8_0:
      return {32, 34};
    case GgmlType::kQ4_K:
      return {256, 144};
    case GgmlType::kQ5_K:
      return {256, 176};
    case GgmlType::kQ6_K:
      return {256, 210};
  }
  throw Error("dequantize: ggml type " + std::to_string(static_cast<int32_t>(type)) +
              " is not supported; convert the weights to one of F32, F16, BF16, Q4_0, Q4_1, Q8_0, "
              "Q4_K, Q5_K, Q6_K");
}

}  // namespace

int64_t dequantize_block_bytes(GgmlType type, int64_t num_elements) {
  const BlockFormat format = block_format(type);
  VL_CHECK(num_elements >= 0 && num_elements % format.elements == 0,
           "dequantize: num_elements is " + std::to_string(num_elements) + ", but ggml type " +
               std::to_string(static_cast<int32_t>(type)) + " has blocks of " +
               std::to_string(format.elements) + " elements");
  return num_elements / format.elements * format.bytes;
}

void dequantize_cpu(const DequantizeParams& params) {
  dequantize_block_bytes(params.type, params.num_elements);
  VL_DISPATCH_ISA(dequantize, params)
}

}  // namespace vllm_lite
