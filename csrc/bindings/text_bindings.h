// Python classes for the text side of the engine core and for the ring between processes.
#pragma once

#include <pybind11/pybind11.h>

namespace vllm_lite {

// Adds TextDecoding, TokenKind, TokenTable, Detokenizer, StopAutomaton, StopMatcher and ShmRing.
// TokenTable and StopAutomaton are held by std::shared_ptr, so that C++ objects can share them.
void bind_text(pybind11::module_& module);

}  // namespace vllm_lite
