// One row of a packed matrix as floats: the embedding lookup.
#pragma once

#include "simd/ops.h"

namespace specsparse {

// out[0 .. cols) = row `row` of w.
void unpack_row(const Matrix& w, int64_t row, float* out);

}  // namespace specsparse
