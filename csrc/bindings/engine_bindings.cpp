#include <pybind11/pybind11.h>

#include "bindings/text_bindings.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "engine core";
  vllm_lite::bind_text(m);
}
