#include <string>

#include "core/check.h"
#include "ops/ops.h"

namespace vllm_lite {

void embedding_cpu(const EmbeddingParams& params) {
  for (int32_t i = 0; i < params.num_tokens; ++i) {
    int32_t token = params.token_ids[i];
    if (token < 0) {
      const int32_t row = ~token;
      VL_CHECK(params.last_tokens != nullptr && row < params.max_rows,
               "embedding: token_ids[" + std::to_string(i) + "] asks for the last token of row " +
                   std::to_string(row) + ", but last_tokens holds " +
                   std::to_string(params.max_rows) + " rows");
      token = params.last_tokens[row];
    }
    VL_CHECK(token >= 0 && token < params.vocab_size,
             "embedding: token " + std::to_string(token) + " (token_ids[" + std::to_string(i) +
                 "]) is outside the table of " + std::to_string(params.vocab_size) + " rows");
  }
  VL_DISPATCH_ISA(embedding, params)
}

}  // namespace vllm_lite
