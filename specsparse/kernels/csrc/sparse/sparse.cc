#include "sparse/sparse.h"

#include "simd/kinds.h"

namespace specsparse {

const SparseOps& sparse_ops() {
#if defined(__x86_64__)
  if (ops().registers == Registers::kAvx512) return kAvx512SparseOps;
  if (ops().registers == Registers::kAvx2) return kAvx2SparseOps;
#endif
  return kPortableSparseOps;
}

bool NeuronDescription::read(const int64_t* d, const void* data, int64_t bytes) {
  rows = {static_cast<const uint8_t*>(data), d[4], d[5], d[6], Codes(d[0]), Scales(d[1]), d[2], static_cast<int32_t>(d[3]), nullptr};
  bool has_lut = false;
  for (int i = 0; i < 16; ++i) lut[i] = static_cast<int8_t>(d[7 + i]), has_lut |= d[7 + i] != 0;
  if (has_lut) rows.lut = lut;
  const bool from_zero = rows.codes == Codes::kNibble && rows.scales == Scales::kD && !has_lut;  // the kernels know Q4_0 by that
  if (rows.zero != (from_zero ? kNibbleZero : 0)) return false;
  return has_kernels(rows) && bytes >= rows.rows * rows.row_bytes;
}

}  // namespace specsparse
