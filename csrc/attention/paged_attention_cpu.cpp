#include "attention/params.h"
#include "core/check.h"
namespace vllm_lite {
void paged_attention_cpu(const PagedAttentionParams&) { throw Error("paged_attention: not built"); }
}
