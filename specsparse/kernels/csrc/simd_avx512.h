// Sixteen-lane vectors as one AVX-512 register, integer dot products by VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace specsparse {
inline namespace SPECSPARSE_ISA {

constexpr int kMaxTokens = 8;

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};

inline F zero() { return {_mm512_setzero_ps()}; }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline F add(F x, F y) { return {_mm512_add_ps(x.v, y.v)}; }
inline F sub(F x, F y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline F mul(F x, F y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline F div(F x, F y) { return {_mm512_div_ps(x.v, y.v)}; }
inline F fma(F x, F y, F z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline F max(F x, F y) { return {_mm512_max_ps(x.v, y.v)}; }
inline F abs(F x) { return {_mm512_abs_ps(x.v)}; }
inline F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline I zero_i() { return {_mm512_setzero_si512()}; }
inline I set1_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I add(I x, I y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline I to_int(F x) { return {_mm512_cvtps_epi32(x.v)}; }
inline F exp2_int(I n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
inline F where_less(F a, F b, F x, F y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_i8(int8_t* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v));
}
inline F load_f16(const void* p) { return {_mm512_cvtph_ps(load256(p))}; }
inline void store_f16(void* p, F x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F load_bf16(const void* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16))};
}
inline F load_i8(const void* p) { return to_float({_mm512_cvtepi8_epi32(load128(p))}); }
inline F load_u8(const void* p) { return to_float({_mm512_cvtepu8_epi32(load128(p))}); }
inline float reduce_add(F x) {
  const __m256 t = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float reduce_max(F x) { return _mm512_reduce_max_ps(x.v); }

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
inline __m512i spread(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}

template <int NT, int SUBS>
inline void dot_nibble(const uint8_t* w, const int8_t* x, int64_t stride, I (*dot)[SUBS], const int8_t* lut) {
  static_assert(SUBS == 1);
  const __m512i mask = _mm512_set1_epi8(15), one = _mm512_set1_epi8(1);
  // VNNI wants unsigned weights: the table is shifted by 128, which 128 * sum(x) takes back.
  const __m512i table = lut ? _mm512_xor_si512(_mm512_broadcast_i32x4(load128(lut)), _mm512_set1_epi8(-128)) : mask;
  __m512i acc[NT], sum[NT];
  for (int t = 0; t < NT; ++t) acc[t] = sum[t] = _mm512_setzero_si512();
  for (int c = 0; c < 4; ++c) {
    const __m512i both = load512(w + 64 * c);
    __m512i low = _mm512_and_si512(both, mask), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    if (lut) low = _mm512_shuffle_epi8(table, low), high = _mm512_shuffle_epi8(table, high);
    for (int t = 0; t < NT; ++t) {
      const __m512i xl = spread(x + t * stride + 4 * c), xh = spread(x + t * stride + 16 + 4 * c);
      acc[t] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(acc[t], low, xl), high, xh);
      if (lut) sum[t] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[t], one, xl), one, xh);
    }
  }
  for (int t = 0; t < NT; ++t)
    dot[t][0].v = lut ? _mm512_sub_epi32(acc[t], _mm512_slli_epi32(sum[t], 7)) : acc[t];
}

// `sums` holds the activation sums of the block's two halves (int32[2]), the next row's `sum_stride` entries on.
template <int NT, int SUBS>
inline void dot_int8(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* sums, int64_t sum_stride,
                     I (*dot)[SUBS]) {
  const __m512i flip = _mm512_set1_epi8(-128);
  for (int s = 0; s < SUBS; ++s) {
    __m512i acc[NT];
    for (int t = 0; t < NT; ++t) {
      const int32_t* st = sums + t * sum_stride;
      acc[t] = _mm512_set1_epi32(-128 * (SUBS == 1 ? st[0] + st[1] : st[s]));
    }
    for (int c = s * 8 / SUBS; c < (s + 1) * 8 / SUBS; ++c) {
      const __m512i wc = _mm512_xor_si512(load512(w + 64 * c), flip);
      for (int t = 0; t < NT; ++t) acc[t] = _mm512_dpbusd_epi32(acc[t], wc, spread(x + t * stride + 4 * c));
    }
    for (int t = 0; t < NT; ++t) dot[t][s].v = acc[t];
  }
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
