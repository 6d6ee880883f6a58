// AMX's tiles: registers of up to 16 rows of 64 bytes, and a product of two of them. Tests have the same in plain C++
// (tests/kernels/emulated_tiles.cc), so that the kernels above them run on processors without.
#pragma once

#include <cstdint>

#include "simd/unroll.h"

namespace specsparse {

constexpr int kTiles = 8;

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int row_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows), bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
};
static_assert(sizeof(TileShapes) == 64, "LDTILECFG reads 64 bytes");

#if defined(__x86_64__)
// The numbers of tiles are part of the instructions.
struct ProcessorTiles {
  static void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
  static void release() { asm volatile("tilerelease"); }
  template <int TILE>
  static SPECSPARSE_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
  }
  template <int TILE>
  static SPECSPARSE_INLINE void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
  }
  template <int TILE>
  static SPECSPARSE_INLINE void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
  }
  // sums[m][n] += the products of a's row m and b's column n: signed bytes, in fours.
  template <int SUMS, int A, int B>
  static SPECSPARSE_INLINE void add_products() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
  }
};
#endif

}  // namespace specsparse
