// Products of several groups of weights for AVX-512: a processor of this kind multiplies two vectors a cycle and reads one, so
// four activations, spread over a vector, serve all groups.
#define SPECSPARSE_ISA avx512_groups
#include "simd/simd_avx512.h"
#include "dense/dot.inl"

namespace specsparse {

bool dot_groups_avx512(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  using Rows = std::integer_sequence<int, 1, 4, kGroupTile>;  // two and three are multiplied like four
  return dot_blocked<kGroupsAtOnce>(Rows(), w, g, kGroupsAtOnce, x, row, tokens, y);
}

}  // namespace specsparse
