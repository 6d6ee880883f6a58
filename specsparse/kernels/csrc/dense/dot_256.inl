// The products of AVX-VNNI, the same in either encoding; `SPECSPARSE_DOT` is the function's name.
#include "simd/simd_avxvnni.h"
#include "dense/dot.inl"

namespace specsparse {
void SPECSPARSE_DOT(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  if (w.is_float()) return kAvx2Ops.dot(w, g, x, row, tokens, y);
  dot_blocked(w, w.data + g * w.group_bytes, x, row, tokens, y);
}
}  // namespace specsparse
