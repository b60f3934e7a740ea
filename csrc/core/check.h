// Two kinds of failure. A caller's mistake (VL_CHECK) is an exception with a sentence that names
// the value and the limit. A mistake of ours (VL_ASSERT) is a broken invariant: it throws too, so
// that a test can see it and a server can fail the step instead of the process.
#pragma once

#include <stdexcept>
#include <string>

namespace vllm_lite {

// The caller gave something that cannot be done. what() is shown to the user as it is.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An invariant of this library does not hold.
class InternalError : public std::logic_error {
  using std::logic_error::logic_error;
};

[[noreturn]] void throw_internal_error(const char* condition, const char* file, int line);

}  // namespace vllm_lite

#define VL_CHECK(condition, message)                     \
  do {                                                   \
    if (!(condition)) throw ::vllm_lite::Error(message); \
  } while (false)

#define VL_ASSERT(condition)                                                             \
  do {                                                                                   \
    if (!(condition)) ::vllm_lite::throw_internal_error(#condition, __FILE__, __LINE__); \
  } while (false)
