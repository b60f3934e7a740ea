// The tile instructions of <immintrin.h> that the kernels use, in software: what Intel's manual
// (TILELOADD, TILESTORED, TDPBF16PS) says of the configured rows and bytes, but that subnormal
// numbers are not taken for zeros. A use of a tile that is not configured, or of operands that do
// not fit each other, aborts. Of internal linkage: it is compiled with instructions that the test
// itself must do without.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace vllm_lite::amx_on_host {
namespace {

struct Tiles {
  bool configured = false;
  int rows[8] = {}, row_bytes[8] = {};
  uint8_t data[8][16][64] = {};

  static void require(bool condition) {
    if (!condition) std::abort();
  }

  void load_config(const void* config) {
    uint8_t bytes[64];
    std::memcpy(bytes, config, sizeof(bytes));
    require(bytes[0] == 1 && bytes[1] == 0);  // palette, start row
    for (int i = 2; i < 16; ++i) require(bytes[i] == 0);
    for (size_t tile = 0; tile < 8; ++tile) {
      row_bytes[tile] = bytes[16 + 2 * tile] | bytes[17 + 2 * tile] << 8;
      rows[tile] = bytes[48 + tile];
      require(row_bytes[tile] <= 64 && rows[tile] <= 16);
    }
    std::memset(data, 0, sizeof(data));
    configured = true;
  }

  void load(size_t tile, const void* from, int64_t stride) {
    require(configured && rows[tile] > 0);
    std::memset(data[tile], 0, sizeof(data[tile]));
    for (int row = 0; row < rows[tile]; ++row) {
      std::memcpy(data[tile][row], static_cast<const uint8_t*>(from) + row * stride,
                  static_cast<size_t>(row_bytes[tile]));
    }
  }

  void store(size_t tile, void* to, int64_t stride) const {
    require(configured && rows[tile] > 0);
    for (int row = 0; row < rows[tile]; ++row) {
      std::memcpy(static_cast<uint8_t*>(to) + row * stride, data[tile][row],
                  static_cast<size_t>(row_bytes[tile]));
    }
  }

  template <typename T>
  T& at(size_t tile, int row, int i) {
    return reinterpret_cast<T*>(data[tile][row])[i];
  }

  static float widen(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  void zero(size_t tile) {
    require(configured && rows[tile] > 0);
    std::memset(data[tile], 0, sizeof(data[tile]));
  }

  // sums[m][n] += the sum over k of a[m][2k] * b[k][2n], plus that of a[m][2k+1] * b[k][2n+1]
  void multiply(size_t sums, size_t a, size_t b) {
    require(configured && rows[sums] == rows[a] && row_bytes[sums] == row_bytes[b] &&
            row_bytes[a] == 4 * rows[b]);
    for (int m = 0; m < rows[sums]; ++m) {
      for (int n = 0; n < row_bytes[sums] / 4; ++n) {
        float products[2] = {};
        for (int k = 0; k < rows[b]; ++k) {
          for (int half = 0; half < 2; ++half) {
            products[half] = std::fma(widen(at<uint16_t>(a, m, 2 * k + half)),
                                      widen(at<uint16_t>(b, k, 2 * n + half)), products[half]);
          }
        }
        at<float>(sums, m, n) += products[0] + products[1];
      }
    }
  }
};
thread_local Tiles tiles;

}  // namespace
}  // namespace vllm_lite::amx_on_host

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) ::vllm_lite::amx_on_host::tiles.load_config(config)
#define _tile_release() (::vllm_lite::amx_on_host::tiles.configured = false)
#define _tile_zero(tile) ::vllm_lite::amx_on_host::tiles.zero(tile)
#define _tile_loadd(tile, from, stride) ::vllm_lite::amx_on_host::tiles.load(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) _tile_loadd(tile, from, stride)
#define _tile_stored(tile, to, stride) ::vllm_lite::amx_on_host::tiles.store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) ::vllm_lite::amx_on_host::tiles.multiply(sums, a, b)
