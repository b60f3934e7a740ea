#include "cache/store_kv.h"
#include "core/check.h"
namespace vllm_lite {
void store_kv_cpu(const StoreKvParams&) { throw Error("store_kv: not built"); }
}
