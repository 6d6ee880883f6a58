// AMX's tiles: registers of up to 16 rows of 64 bytes, and a product of two of them. As the processor has them, and in plain C++
// with the same meaning, so that the kernels above them are tested on processors without.
#pragma once

#include <cstdint>
#include <cstring>

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

// Not copied into the kernels, which take in what they call.
#define SPECSPARSE_APART __attribute__((noinline))

// Shapes that do not fit are a fault, as they are on a processor.
class EmulatedTiles {
 public:
  static void configure(const TileShapes& shapes) {
    need(shapes.palette == 1 && shapes.start_row == 0);
    for (int t = 0; t < kTiles; ++t) need(shapes.rows[t] <= 16 && shapes.bytes[t] <= 64);
    state() = {};
    state().shapes = shapes;
  }
  static void release() { state().shapes.palette = 0; }
  template <int TILE>
  static SPECSPARSE_APART void zero() {
    need(state().shapes.palette == 1);
    std::memset(state().data[TILE], 0, sizeof state().data[TILE]);
  }
  template <int TILE>
  static SPECSPARSE_APART void load(const void* p, int64_t stride) {
    zero<TILE>();
    const TileShapes& s = state().shapes;
    for (int r = 0; r < s.rows[TILE]; ++r) std::memcpy(state().data[TILE][r], static_cast<const char*>(p) + r * stride, s.bytes[TILE]);
  }
  template <int TILE>
  static SPECSPARSE_APART void store(void* p, int64_t stride) {
    need(state().shapes.palette == 1);
    const TileShapes& s = state().shapes;
    for (int r = 0; r < s.rows[TILE]; ++r) std::memcpy(static_cast<char*>(p) + r * stride, state().data[TILE][r], s.bytes[TILE]);
  }
  template <int SUMS, int A, int B>
  static SPECSPARSE_APART void add_products() {
    const TileShapes& s = state().shapes;
    need(s.palette == 1 && s.rows[SUMS] == s.rows[A] && s.bytes[SUMS] == s.bytes[B] && s.bytes[A] == 4 * s.rows[B]);
    for (int m = 0; m < s.rows[A]; ++m)
      for (int n = 0; n < s.bytes[B] / 4; ++n) {
        int32_t sum;
        std::memcpy(&sum, state().data[SUMS][m] + 4 * n, 4);
        for (int k = 0; k < s.bytes[A]; ++k) sum += state().data[A][m][k] * state().data[B][k / 4][4 * n + k % 4];
        std::memcpy(state().data[SUMS][m] + 4 * n, &sum, 4);
      }
  }

 private:
  struct State {
    TileShapes shapes;
    int8_t data[kTiles][16][64];
  };
  static State& state() {
    thread_local State tiles;
    return tiles;
  }
  static void need(bool right) {
    if (!right) __builtin_trap();
  }
};

}  // namespace specsparse
