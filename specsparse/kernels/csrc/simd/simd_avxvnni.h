// Integer dot products of AVX-VNNI: AVX2's registers, four products of bytes added to 32 bits by one instruction.
//
// Client processors know it in the encoding of AVX, servers with AVX-512 in that of AVX-512; the body is one.
#pragma once

#include "simd/lanes_avx2.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// sum + w * x, codes of w unsigned.
inline __m256i dot4_add(__m256i sum, __m256i w, __m256i x) {
#if defined(__AVX512VNNI__)
  return _mm256_dpbusd_epi32(sum, w, x);
#else
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#endif
}

// Sums that begin at first(token).
template <int NT, int WIDE, class First>
SPECSPARSE_INLINE void start(SI (*dot)[NT], First first) {
  each<NT>([&](auto t) SPECSPARSE_EACH {
    const __m256i value = _mm256_set1_epi32(first(t));
    each<WIDE>([&](auto v) SPECSPARSE_EACH { dot[v][t].v = value; });
  });
}

// dot += products of unsigned codes, four columns of x from `at` on.
template <int NT, int WIDE>
SPECSPARSE_INLINE void add_products(SI (*dot)[NT], const __m256i* code, const QBlock* x, int at) {
  each<NT>([&](auto t) SPECSPARSE_EACH {
    const __m256i q = spread(x[t].q + at);
    each<WIDE>([&](auto v) SPECSPARSE_EACH { dot[v][t].v = dot4_add(dot[v][t].v, code[v], q); });
  });
}

// Nibbles through `value`, which gives unsigned bytes.
template <int NT, int WIDE, class Value>
SPECSPARSE_INLINE void add_nibbles(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], Value value) {
  const __m256i mask = _mm256_set1_epi8(15);
  each<4>([&](auto c) SPECSPARSE_EACH {
    __m256i low[WIDE], high[WIDE];
    each<WIDE>([&](auto v) SPECSPARSE_EACH {
      const __m256i both = load256(w[v] + 64 * c);
      low[v] = value(_mm256_and_si256(both, mask)), high[v] = value(_mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
    });
    add_products<NT, WIDE>(dot, low, x, 4 * c);
    add_products<NT, WIDE>(dot, high, x, 16 + 4 * c);
  });
}

template <int NT, int WIDE>
SPECSPARSE_INLINE void dot_codes(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], int32_t zero) {
  start<NT, WIDE>(dot, [&](int t) SPECSPARSE_EACH { return -zero * x[t].sum; });
  add_nibbles<NT, WIDE>(w, x, dot, [](__m256i v) SPECSPARSE_EACH { return v; });
}

// Weights must be unsigned: the table is shifted by 128, which 128 * sum(x) takes back.
template <int NT, int WIDE>
SPECSPARSE_INLINE void dot_table(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], const int8_t* lut) {
  const __m256i table = _mm256_xor_si256(_mm256_broadcastsi128_si256(load128(lut)), _mm256_set1_epi8(-128));
  start<NT, WIDE>(dot, [&](int t) SPECSPARSE_EACH { return x[t].less[0]; });
  add_nibbles<NT, WIDE>(w, x, dot, [&](__m256i v) SPECSPARSE_EACH { return _mm256_shuffle_epi8(table, v); });
}

// int8 codes of `CHUNKS` chunks of four columns from chunk FIRST on: the block or half of it.
template <int NT, int WIDE, int CHUNKS, int FIRST>
SPECSPARSE_INLINE void dot_int8(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT]) {
  const __m256i flip = _mm256_set1_epi8(-128);
  start<NT, WIDE>(dot, [&](int t) SPECSPARSE_EACH { return x[t].less[CHUNKS == 8 ? 0 : 1 + FIRST / 4]; });
  each<CHUNKS>([&](auto c) SPECSPARSE_EACH {
    __m256i code[WIDE];
    each<WIDE>([&](auto v) SPECSPARSE_EACH { code[v] = _mm256_xor_si256(load256(w[v] + 64 * (FIRST + c)), flip); });
    add_products<NT, WIDE>(dot, code, x, 4 * (FIRST + c));
  });
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
