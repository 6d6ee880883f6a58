// Integer dot products of AVX2: pairs of bytes to 16 bits, pairs of those to 32.
#pragma once

#include "simd/lanes_avx2.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// |w| * (x with the sign of w): products of signed bytes, summed in fours.
inline __m256i dot4_signed(__m256i magnitude, __m256i w, __m256i x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
}

// dot += products of signed codes, four columns of x from `at` on.
template <int NT, int WIDE>
SPECSPARSE_INLINE void add_signed(SI (*dot)[NT], const __m256i* code, const QBlock* x, int at) {
  __m256i magnitude[WIDE];
  each<WIDE>([&](auto v) SPECSPARSE_EACH { magnitude[v] = _mm256_abs_epi8(code[v]); });
  each<NT>([&](auto t) SPECSPARSE_EACH {
    const __m256i q = spread(x[t].q + at);
    each<WIDE>([&](auto v) SPECSPARSE_EACH {
      dot[v][t].v = pinned(_mm256_add_epi32(dot[v][t].v, dot4_signed(magnitude[v], code[v], q)));
    });
  });
}

// Codes 0..15 times int8: a pair is at most 2 * 15 * 127, so the eight pairs of a block fit 16 bits unsummed.
template <int NT, int WIDE>
SPECSPARSE_INLINE void dot_codes(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], int32_t zero) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i a[WIDE][NT];
  each<4>([&](auto c) SPECSPARSE_EACH {
    __m256i codes[WIDE];
    each<WIDE>([&](auto v) SPECSPARSE_EACH { codes[v] = pinned(load256(w[v] + 64 * c)); });
    each<2>([&](auto high) SPECSPARSE_EACH {
      __m256i code[WIDE];
      each<WIDE>([&](auto v) SPECSPARSE_EACH { code[v] = _mm256_and_si256(high ? _mm256_srli_epi16(codes[v], 4) : codes[v], mask); });
      each<NT>([&](auto t) SPECSPARSE_EACH {
        const __m256i q = spread(x[t].q + 16 * high + 4 * c);
        each<WIDE>([&](auto v) SPECSPARSE_EACH {
          const __m256i pairs = _mm256_maddubs_epi16(code[v], q);
          a[v][t] = c || high ? pinned(_mm256_add_epi16(a[v][t], pairs)) : pairs;
        });
      });
    });
  });
  each<NT>([&](auto t) SPECSPARSE_EACH {
    each<WIDE>([&](auto v) SPECSPARSE_EACH {
      dot[v][t] = {_mm256_madd_epi16(a[v][t], ones)};
      if (zero) dot[v][t] = slice_minus(dot[v][t], zero * x[t].sum);
    });
  });
}

// Codes that stand for the 16 signed values of a table.
template <int NT, int WIDE>
SPECSPARSE_INLINE void dot_table(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], const int8_t* lut) {
  const __m256i mask = _mm256_set1_epi8(15), table = _mm256_broadcastsi128_si256(load128(lut));
  each<WIDE>([&](auto v) SPECSPARSE_EACH { each<NT>([&](auto t) SPECSPARSE_EACH { dot[v][t] = {_mm256_setzero_si256()}; }); });
  each<4>([&](auto c) SPECSPARSE_EACH {
    each<2>([&](auto high) SPECSPARSE_EACH {
      __m256i code[WIDE];
      each<WIDE>([&](auto v) SPECSPARSE_EACH {
        const __m256i codes = load256(w[v] + 64 * c);
        code[v] = _mm256_shuffle_epi8(table, _mm256_and_si256(high ? _mm256_srli_epi16(codes, 4) : codes, mask));
      });
      add_signed<NT, WIDE>(dot, code, x, 16 * high + 4 * c);
    });
  });
}

// int8 codes of `CHUNKS` chunks of four columns from chunk FIRST on: the block or half of it.
template <int NT, int WIDE, int CHUNKS, int FIRST>
SPECSPARSE_INLINE void dot_int8(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT]) {
  each<WIDE>([&](auto v) SPECSPARSE_EACH { each<NT>([&](auto t) SPECSPARSE_EACH { dot[v][t] = {_mm256_setzero_si256()}; }); });
  each<CHUNKS>([&](auto c) SPECSPARSE_EACH {
    __m256i code[WIDE];
    each<WIDE>([&](auto v) SPECSPARSE_EACH { code[v] = load256(w[v] + 64 * (FIRST + c)); });
    add_signed<NT, WIDE>(dot, code, x, 4 * (FIRST + c));
  });
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
