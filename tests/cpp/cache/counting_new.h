#pragma once

#include <cstdint>

// Calls of operator new in this program so far, from any thread. counting_new.cpp replaces it.
int64_t num_allocations();
