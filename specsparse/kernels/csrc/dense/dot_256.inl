// The products of AVX-VNNI, the same in either encoding; `SPECSPARSE_DOT` and `SPECSPARSE_DOT_GROUPS` name the functions.
#include "simd/simd_avxvnni.h"
#include "dense/dot.inl"

namespace specsparse {

void SPECSPARSE_DOT(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  if (!dot_blocked<1>(RowsAtOnce(), w, g, 1, x, row, tokens, y)) kAvx2Ops.dot(w, g, x, row, tokens, y);
}

bool SPECSPARSE_DOT_GROUPS(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  return dot_blocked<1>(RowsAtOnce(), w, g, kGroupsAtOnce, x, row, tokens, y);
}

}  // namespace specsparse
