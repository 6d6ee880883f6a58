// Integer dot products of AVX2: pairs of bytes to 16 bits, pairs of those to 32.
#pragma once

#include "simd/lanes_avx2.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

constexpr int kMaxTokens = 4;

// |w| * (x with the sign of w): products of signed bytes, summed in fours.
inline __m256i dot4_signed(__m256i magnitude, __m256i w, __m256i x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
}

// Codes 0..15 times int8: a pair is at most 2 * 15 * 127, so the eight pairs of a block fit 16 bits unsummed.
template <int NT, int SLICES>
SPECSPARSE_INLINE void dot_codes(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT], int32_t zero) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i a[SLICES][NT];
  each<4>([&](auto c) SPECSPARSE_EACH {
    __m256i codes[SLICES];
    each<SLICES>([&](auto s) SPECSPARSE_EACH { codes[s] = pinned(load256(w + 64 * c + 32 * s)); });
    each<2>([&](auto high) SPECSPARSE_EACH {
      __m256i v[SLICES];
      each<SLICES>([&](auto s) SPECSPARSE_EACH { v[s] = _mm256_and_si256(high ? _mm256_srli_epi16(codes[s], 4) : codes[s], mask); });
      each<NT>([&](auto t) SPECSPARSE_EACH {
        const __m256i q = spread(x[t]->q + 16 * high + 4 * c);
        each<SLICES>([&](auto s) SPECSPARSE_EACH {
          const __m256i pairs = _mm256_maddubs_epi16(v[s], q);
          a[s][t] = c || high ? pinned(_mm256_add_epi16(a[s][t], pairs)) : pairs;
        });
      });
    });
  });
  each<SLICES>([&](auto s) SPECSPARSE_EACH { each<NT>([&](auto t) SPECSPARSE_EACH {
    dot[s][t] = {_mm256_madd_epi16(a[s][t], ones)};
    if (zero) dot[s][t] = slice_minus(dot[s][t], zero * x[t]->sum);
  }); });
}

// Codes that stand for the 16 signed values of a table.
template <int NT, int SLICES>
SPECSPARSE_INLINE void dot_table(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT], const int8_t* lut) {
  const __m256i mask = _mm256_set1_epi8(15), table = _mm256_broadcastsi128_si256(load128(lut));
  each<SLICES>([&](auto s) SPECSPARSE_EACH { each<NT>([&](auto t) SPECSPARSE_EACH { dot[s][t] = {_mm256_setzero_si256()}; }); });
  each<4>([&](auto c) SPECSPARSE_EACH {
    each<2>([&](auto high) SPECSPARSE_EACH {
      __m256i v[SLICES], m[SLICES];
      each<SLICES>([&](auto s) SPECSPARSE_EACH {
        const __m256i codes = load256(w + 64 * c + 32 * s);
        v[s] = _mm256_shuffle_epi8(table, _mm256_and_si256(high ? _mm256_srli_epi16(codes, 4) : codes, mask));
        m[s] = _mm256_abs_epi8(v[s]);
      });
      each<NT>([&](auto t) SPECSPARSE_EACH {
        const __m256i q = spread(x[t]->q + 16 * high + 4 * c);
        each<SLICES>([&](auto s) SPECSPARSE_EACH { dot[s][t].v = pinned(_mm256_add_epi32(dot[s][t].v, dot4_signed(m[s], v[s], q))); });
      });
    });
  });
}

// int8 codes of `CHUNKS` chunks of four columns from chunk FIRST on: the block or half of it.
template <int NT, int SLICES, int CHUNKS, int FIRST>
SPECSPARSE_INLINE void dot_int8(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT]) {
  each<SLICES>([&](auto s) SPECSPARSE_EACH { each<NT>([&](auto t) SPECSPARSE_EACH { dot[s][t] = {_mm256_setzero_si256()}; }); });
  each<CHUNKS>([&](auto c) SPECSPARSE_EACH {
    __m256i v[SLICES], m[SLICES];
    each<SLICES>([&](auto s) SPECSPARSE_EACH { v[s] = load256(w + 64 * (FIRST + c) + 32 * s), m[s] = _mm256_abs_epi8(v[s]); });
    each<NT>([&](auto t) SPECSPARSE_EACH {
      const __m256i q = spread(x[t]->q + 4 * (FIRST + c));
      each<SLICES>([&](auto s) SPECSPARSE_EACH { dot[s][t].v = pinned(_mm256_add_epi32(dot[s][t].v, dot4_signed(m[s], v[s], q))); });
    });
  });
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
