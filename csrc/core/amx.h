// AMX's tile registers: what the kernels of the instruction set `amx` share. Only for files named
// *_isa.cpp; what simd.h says holds here.
#pragma once

#include <cstdint>

#include "core/simd.h"

namespace vllm_lite::VL_ISA {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

// To the compiler a tile instruction reads no memory (GCC's intrinsics do not say so): what it
// reads through `memory` must have been written by now.
VL_SIMD void finish_writes(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  VL_SIMD void set(TileConfig& config, int tile, int rows, int row_bytes) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
};

// The tiles are this thread's, in this shape, while the object lives.
class TileScope {
 public:
  __attribute__((always_inline)) explicit TileScope(const TileConfig& config) {
    finish_writes(&config);
    _tile_loadconfig(&config);
  }
  __attribute__((always_inline)) ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace vllm_lite::VL_ISA
