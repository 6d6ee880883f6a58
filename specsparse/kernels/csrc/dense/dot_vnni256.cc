// The same body in the encoding of AVX-512, for processors that have VNNI in that one alone.
#define SPECSPARSE_ISA vnni256
#include "simd/simd_avxvnni.h"
#include "dense/dot.inl"

namespace specsparse {
void dot_vnni256(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  if (w.is_float()) return kAvx2Ops.dot(w, g, x, row, tokens, y);
  dot_blocked(w, w.data + g * w.group_bytes, x, row, tokens, y);
}
}  // namespace specsparse
