// Sixty-four codes as two AVX2 registers: what the neuron kernels need beyond simd_avx2.h.
#pragma once

#include "simd_avx2.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// Lane i of sixteen holds columns 4i .. 4i + 3.
struct Bytes {
  __m256i a, b;
};

inline Bytes load_bytes(const void* p) { return {load256(p), load256(static_cast<const char*>(p) + 32)}; }
inline Bytes load_nibbles(const void* p) {
  const __m256i both = load256(p), mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}
inline Bytes minus(Bytes x, int32_t y) {
  const __m256i v = _mm256_set1_epi8(static_cast<char>(y));
  return {_mm256_sub_epi8(x.a, v), _mm256_sub_epi8(x.b, v)};
}
inline Bytes lookup(Bytes x, const int8_t* lut) {
  const __m256i table = _mm256_broadcastsi128_si256(load128(lut));
  return {_mm256_shuffle_epi8(table, x.a), _mm256_shuffle_epi8(table, x.b)};
}
inline Bytes magnitude(Bytes x) { return {_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)}; }
// Sums of four products each; m = magnitude(w).
inline I dot4(Bytes m, Bytes w, const int8_t* x) {
  return {dot4_signed(m.a, w.a, load256(x)), dot4_signed(m.b, w.b, load256(x + 32))};
}
// Column 4i + K of each lane.
template <int K>
inline F column(Bytes x) {
  return to_float({_mm256_srai_epi32(_mm256_slli_epi32(x.a, 24 - 8 * K), 24),
                   _mm256_srai_epi32(_mm256_slli_epi32(x.b, 24 - 8 * K), 24)});
}
// The scales of a chunk's 2 * SUBS sub-blocks, each in the lanes of its columns.
template <int SUBS>
inline F spread_scales(const float* s) {
  if (SUBS == 1) return {_mm256_broadcast_ss(s), _mm256_broadcast_ss(s + 1)};
  return {_mm256_set_m128(_mm_broadcast_ss(s + 1), _mm_broadcast_ss(s)),
          _mm256_set_m128(_mm_broadcast_ss(s + 3), _mm_broadcast_ss(s + 2))};
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
