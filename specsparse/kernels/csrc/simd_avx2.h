// Sixteen-lane vectors as two AVX2 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace specsparse {
inline namespace SPECSPARSE_ISA {

constexpr int kMaxTokens = 4;

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F exp2_int(I n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}
inline F where_less(F a, F b, F x, F y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
inline void store_i8(int8_t* p, I x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline F load_f16(const void* p) {
  const char* c = static_cast<const char*>(p);
  return {_mm256_cvtph_ps(load128(c)), _mm256_cvtph_ps(load128(c + 16))};
}
inline void store_f16(void* p, F x) {
  __m128i* out = static_cast<__m128i*>(p);
  _mm_storeu_si128(out, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(out + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline F load_bf16(const void* p) {
  const char* c = static_cast<const char*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(c)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(c + 16)), 16))};
}
inline F load_i8(const void* p) {
  const __m128i v = load128(p);
  return to_float({_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))});
}
inline F load_u8(const void* p) {
  const __m128i v = load128(p);
  return to_float({_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))});
}
inline float reduce_add(F x) {
  const __m256 t = _mm256_add_ps(x.a, x.b);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float reduce_max(F x) {
  const __m256 t = _mm256_max_ps(x.a, x.b);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

inline __m256i spread(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// |w| * (x with the sign of w): products of signed bytes, summed in fours.
inline __m256i dot4_signed(__m256i magnitude, __m256i w, __m256i x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
}

// Codes 0..15 times int8: a pair is at most 2 * 15 * 127, so the eight pairs of a block fit 16 bits unsummed.
template <int NT, int SUBS>
inline void dot_codes(const uint8_t* w, const int8_t* x, int64_t stride, I (*dot)[SUBS]) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i a[NT], b[NT];
  for (int t = 0; t < NT; ++t) a[t] = b[t] = _mm256_setzero_si256();
  for (int c = 0; c < 4; ++c) {
    const __m256i w0 = load256(w + 64 * c), w1 = load256(w + 64 * c + 32);
    const __m256i low0 = _mm256_and_si256(w0, mask), low1 = _mm256_and_si256(w1, mask);
    const __m256i high0 = _mm256_and_si256(_mm256_srli_epi16(w0, 4), mask);
    const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(w1, 4), mask);
    for (int t = 0; t < NT; ++t) {
      const __m256i xl = spread(x + t * stride + 4 * c), xh = spread(x + t * stride + 16 + 4 * c);
      a[t] = _mm256_add_epi16(a[t], _mm256_add_epi16(_mm256_maddubs_epi16(low0, xl), _mm256_maddubs_epi16(high0, xh)));
      b[t] = _mm256_add_epi16(b[t], _mm256_add_epi16(_mm256_maddubs_epi16(low1, xl), _mm256_maddubs_epi16(high1, xh)));
    }
  }
  for (int t = 0; t < NT; ++t) dot[t][0] = {_mm256_madd_epi16(a[t], ones), _mm256_madd_epi16(b[t], ones)};
}

template <int NT, int SUBS>
inline void dot_nibble(const uint8_t* w, const int8_t* x, int64_t stride, I (*dot)[SUBS], const int8_t* lut) {
  static_assert(SUBS == 1);
  if (!lut) return dot_codes<NT, SUBS>(w, x, stride, dot);
  const __m256i mask = _mm256_set1_epi8(15), table = _mm256_broadcastsi128_si256(load128(lut));
  for (int t = 0; t < NT; ++t) dot[t][0] = zero_i();
  for (int c = 0; c < 4; ++c) {
    const __m256i w0 = load256(w + 64 * c), w1 = load256(w + 64 * c + 32);
    const __m256i v[4] = {_mm256_shuffle_epi8(table, _mm256_and_si256(w0, mask)),
                          _mm256_shuffle_epi8(table, _mm256_and_si256(w1, mask)),
                          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(w0, 4), mask)),
                          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(w1, 4), mask))};
    for (int t = 0; t < NT; ++t) {
      const __m256i xl = spread(x + t * stride + 4 * c), xh = spread(x + t * stride + 16 + 4 * c);
      I& d = dot[t][0];
      d.a = _mm256_add_epi32(d.a, dot4_signed(_mm256_abs_epi8(v[0]), v[0], xl));
      d.b = _mm256_add_epi32(d.b, dot4_signed(_mm256_abs_epi8(v[1]), v[1], xl));
      d.a = _mm256_add_epi32(d.a, dot4_signed(_mm256_abs_epi8(v[2]), v[2], xh));
      d.b = _mm256_add_epi32(d.b, dot4_signed(_mm256_abs_epi8(v[3]), v[3], xh));
    }
  }
}

template <int NT, int SUBS>
inline void dot_int8(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t*, int64_t, I (*dot)[SUBS]) {
  for (int s = 0; s < SUBS; ++s) {
    __m256i a[NT], b[NT];
    for (int t = 0; t < NT; ++t) a[t] = b[t] = _mm256_setzero_si256();
    for (int c = s * 8 / SUBS; c < (s + 1) * 8 / SUBS; ++c) {
      const __m256i w0 = load256(w + 64 * c), w1 = load256(w + 64 * c + 32);
      const __m256i m0 = _mm256_abs_epi8(w0), m1 = _mm256_abs_epi8(w1);
      for (int t = 0; t < NT; ++t) {
        const __m256i xc = spread(x + t * stride + 4 * c);
        a[t] = _mm256_add_epi32(a[t], dot4_signed(m0, w0, xc));
        b[t] = _mm256_add_epi32(b[t], dot4_signed(m1, w1, xc));
      }
    }
    for (int t = 0; t < NT; ++t) dot[t][s] = {a[t], b[t]};
  }
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
