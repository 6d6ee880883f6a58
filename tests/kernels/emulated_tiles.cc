// AMX's kernels over tiles in plain C++, so that they are tested on processors without AMX: a library of its own, which
// tests/kernels/emulated_tiles.py compiles.
#define SPECSPARSE_ISA amx_emulated
#include <cstring>

#include "dense/dot_amx.inl"

namespace specsparse {
namespace {

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

const Ops* known;

}  // namespace
}  // namespace specsparse

// Writes the table that tiles make of AVX-512's, which must outlive it.
extern "C" void specsparse_emulated_tiles(const specsparse::Ops* avx512, specsparse::Ops* table) {
  using namespace specsparse;
  known = avx512, *table = *avx512;
  table->name = "amx_emulated", table->tile = kMostRows, table->leave = Shapes<EmulatedTiles>::release;
  table->dot = [](const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
    dot<EmulatedTiles>(w, g, x, row, tokens, y, known->dot);
  };
  table->dot_groups = nullptr;
}
