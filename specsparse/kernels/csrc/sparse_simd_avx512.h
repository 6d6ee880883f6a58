// Sixty-four codes as one AVX-512 register: what the neuron kernels need beyond simd_avx512.h.
#pragma once

#include "simd_avx512.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// Lane i of sixteen holds columns 4i .. 4i + 3.
struct Bytes {
  __m512i v;
};

inline Bytes load_bytes(const void* p) { return {load512(p)}; }
inline Bytes load_nibbles(const void* p) {
  const __m256i both = load256(p);
  const __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(both), _mm256_srli_epi16(both, 4), 1);
  return {_mm512_and_si512(halves, _mm512_set1_epi8(15))};
}
inline Bytes minus(Bytes x, int32_t y) { return {_mm512_sub_epi8(x.v, _mm512_set1_epi8(static_cast<char>(y)))}; }
inline Bytes lookup(Bytes x, const int8_t* lut) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load128(lut)), x.v)};
}
inline Bytes magnitude(Bytes x) { return {_mm512_abs_epi8(x.v)}; }
// Sums of four products each; m = magnitude(w). VNNI wants one unsigned factor, so x takes the sign of w.
inline I dot4(Bytes m, Bytes w, const int8_t* x) {
  const __m512i v = load512(x);
  const __m512i turned = _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(w.v), _mm512_setzero_si512(), v);
  return {_mm512_dpbusd_epi32(_mm512_setzero_si512(), m.v, turned)};
}
// Column 4i + K of each lane.
template <int K>
inline F column(Bytes x) {
  return to_float(I{_mm512_srai_epi32(_mm512_slli_epi32(x.v, 24 - 8 * K), 24)});
}
// The scales of a chunk's 2 * SUBS sub-blocks, each in the lanes of its columns.
template <int SUBS>
inline F spread_scales(const float* s) {
  if (SUBS == 1) return {_mm512_mask_broadcastss_ps(_mm512_set1_ps(s[0]), 0xff00, _mm_load_ss(s + 1))};
  return {_mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
                                _mm512_castps128_ps512(_mm_loadu_ps(s)))};
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
