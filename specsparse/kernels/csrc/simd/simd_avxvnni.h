// Integer dot products of AVX-VNNI: AVX2's registers, four products of bytes added to 32 bits by one instruction.
//
// Client processors know it in the encoding of AVX, servers with AVX-512 in that of AVX-512; the body is one.
#pragma once

#include "simd/lanes_avx2.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

constexpr int kMaxTokens = 4;

// sum + w * x, codes of w unsigned.
inline __m256i dot4_add(__m256i sum, __m256i w, __m256i x) {
#if defined(__AVX512VNNI__)
  return _mm256_dpbusd_epi32(sum, w, x);
#else
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#endif
}

// Sums that begin at first(token).
template <int NT, int SLICES, class First>
SPECSPARSE_INLINE void start(SI (*dot)[NT], First first) {
  each<NT>([&](auto t) SPECSPARSE_EACH {
    const __m256i value = _mm256_set1_epi32(first(t));
    each<SLICES>([&](auto s) SPECSPARSE_EACH { dot[s][t].v = value; });
  });
}

// Nibbles through `code`, which gives unsigned bytes.
template <int NT, int SLICES, class Code>
SPECSPARSE_INLINE void add_nibbles(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT], Code code) {
  const __m256i mask = _mm256_set1_epi8(15);
  each<4>([&](auto c) SPECSPARSE_EACH {
    __m256i low[SLICES], high[SLICES];
    each<SLICES>([&](auto s) SPECSPARSE_EACH {
      const __m256i both = load256(w + 64 * c + 32 * s);
      low[s] = code(_mm256_and_si256(both, mask)), high[s] = code(_mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
    });
    each<NT>([&](auto t) SPECSPARSE_EACH {
      const __m256i first = spread(x[t]->q + 4 * c), second = spread(x[t]->q + 16 + 4 * c);
      each<SLICES>([&](auto s) SPECSPARSE_EACH { dot[s][t].v = dot4_add(dot4_add(dot[s][t].v, low[s], first), high[s], second); });
    });
  });
}

template <int NT, int SLICES>
SPECSPARSE_INLINE void dot_codes(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT], int32_t zero) {
  start<NT, SLICES>(dot, [&](int t) SPECSPARSE_EACH { return -zero * x[t]->sum; });
  add_nibbles<NT, SLICES>(w, x, dot, [](__m256i v) SPECSPARSE_EACH { return v; });
}

// Weights must be unsigned: the table is shifted by 128, which 128 * sum(x) takes back.
template <int NT, int SLICES>
SPECSPARSE_INLINE void dot_table(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT], const int8_t* lut) {
  const __m256i table = _mm256_xor_si256(_mm256_broadcastsi128_si256(load128(lut)), _mm256_set1_epi8(-128));
  start<NT, SLICES>(dot, [&](int t) SPECSPARSE_EACH { return x[t]->less[0]; });
  add_nibbles<NT, SLICES>(w, x, dot, [&](__m256i v) SPECSPARSE_EACH { return _mm256_shuffle_epi8(table, v); });
}

// int8 codes of `CHUNKS` chunks of four columns from chunk FIRST on: the block or half of it.
template <int NT, int SLICES, int CHUNKS, int FIRST>
SPECSPARSE_INLINE void dot_int8(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT]) {
  const __m256i flip = _mm256_set1_epi8(-128);
  start<NT, SLICES>(dot, [&](int t) SPECSPARSE_EACH { return x[t]->less[CHUNKS == 8 ? 0 : 1 + FIRST / 4]; });
  each<CHUNKS>([&](auto c) SPECSPARSE_EACH {
    __m256i v[SLICES];
    each<SLICES>([&](auto s) SPECSPARSE_EACH { v[s] = _mm256_xor_si256(load256(w + 64 * (FIRST + c) + 32 * s), flip); });
    each<NT>([&](auto t) SPECSPARSE_EACH {
      const __m256i q = spread(x[t]->q + 4 * (FIRST + c));
      each<SLICES>([&](auto s) SPECSPARSE_EACH { dot[s][t].v = dot4_add(dot[s][t].v, v[s], q); });
    });
  });
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
