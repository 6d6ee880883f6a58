#define SPECSPARSE_ISA avx2
#include "simd/simd_avx2.h"
#include "dense/kernels.inl"

namespace specsparse {
namespace {
bool dot_groups(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  return dot_blocked<1>(RowsAtOnce(), w, g, kGroupsAtOnce, x, row, tokens, y);
}
}  // namespace
const Ops kAvx2Ops = SPECSPARSE_TABLE("avx2", Registers::kAvx2, dot_groups);
}
