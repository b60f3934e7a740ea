#include "core/check.h"

namespace vllm_lite {

void throw_internal_error(const char* condition, const char* file, int line) {
  throw InternalError("internal error: " + std::string(condition) + " does not hold (" + file +
                      ":" + std::to_string(line) + ")");
}

}  // namespace vllm_lite
