#include <string>

#include "core/check.h"
#include "ops/ops.h"

namespace vllm_lite {

void check_token_ids(const int32_t* token_ids, int32_t num_tokens, const int32_t* last_tokens,
                     int32_t max_rows, int64_t vocab_size) {
  for (int32_t i = 0; i < num_tokens; ++i) {
    int32_t token = token_ids[i];
    if (token < 0) {
      const int32_t row = ~token;
      VL_CHECK(last_tokens != nullptr && row < max_rows,
               "embedding: token_ids[" + std::to_string(i) + "] asks for the last token of row " +
                   std::to_string(row) + ", but last_tokens holds " + std::to_string(max_rows) +
                   " rows");
      token = last_tokens[row];
    }
    VL_CHECK(token >= 0 && token < vocab_size,
             "embedding: token " + std::to_string(token) + " (token_ids[" + std::to_string(i) +
                 "]) is outside the table of " + std::to_string(vocab_size) + " rows");
  }
}

void embedding_cpu(const EmbeddingParams& params) {
  check_token_ids(params.token_ids, params.num_tokens, params.last_tokens, params.max_rows,
                  params.vocab_size);
  VL_DISPATCH_ISA(embedding, params)
}

}  // namespace vllm_lite
