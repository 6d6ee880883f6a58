// Look-ups in plain C++: what the table kernels need beyond simd_portable.h.
#pragma once

#include "lut/lut.h"
#include "simd/simd_portable.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// dot[.][t].v[r] = sum over quads and bits of 2^bit * the entry that row r's bits choose.
template <Sums KIND, int NT, int SLICES>
inline void look_up(const uint8_t* w, const uint8_t* const* x, SI (*dot)[NT]) {
  for (int t = 0; t < NT; ++t) (*dot)[t] = zero_i();
  for (int c = 0; c < 4; ++c)
    for (int r = 0; r < 16; ++r)
      for (int b = 0; b < 4; ++b) {
        const uint8_t pair = w[64 * c + 4 * r + b];
        for (int t = 0; t < NT; ++t) {
          const int8_t* entries = reinterpret_cast<const int8_t*>(x[t]);
          const int at[2] = {16 * c + (pair & 15), 16 * (4 + c) + (pair >> 4)};
          for (int i : at) (*dot)[t].v[r] += (1 << b) * (KIND == Sums::kExact ? entries[i] + 256 * entries[kTableBytes + i] : entries[i]);
        }
      }
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
