// Scales of packed blocks, row by row of a group, over the slices of the simd_*.h that was included before.
#pragma once

#include "simd/kinds.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// What a super-block's header says of a slice; nothing where a kind has none.
struct Super {
  S d, m;
};

template <class Kind>
SPECSPARSE_INLINE void load_super(const uint8_t* header, int row, Super& to) {
  to.d = slice_f16(header + 2 * row);
  if (Kind::kMins) to.m = slice_f16(header + 32 + 2 * row);
}

// Of sub-block SUB, rows from `row` on.
template <class Kind, int SUB>
SPECSPARSE_INLINE S scale_of(const uint8_t* block, int row, const Super& super) {
  const uint8_t* at = block + Kind::kScaleBytes * SUB;
  if constexpr (Kind::kScales == Scales::kF32) return slice_load(at + 4 * row);
  if constexpr (Kind::kHalves) return slice_f16(at + 2 * row);
  return mul(super.d, slice_i8(at + row));
}

template <class Kind, int SUB>
SPECSPARSE_INLINE S min_of(const uint8_t* block, int row, const Super& super) {
  if constexpr (Kind::kScales == Scales::kDm) return slice_f16(block + Kind::kScaleBytes * SUB + 32 + 2 * row);
  return sub(slice_zero(), mul(super.m, slice_u8(block + 16 * (Kind::kSubs + SUB) + row)));
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
