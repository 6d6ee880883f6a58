// Sixteen-lane vectors as one AVX-512 register, integer dot products by VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "simd/ops.h"
#include "simd/simd_x86.h"
#include "simd/unroll.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// Sums of attention that the registers hold, and queries of a group.
constexpr int kScoreSums = 16, kValueSums = 16, kGroup = 8;
constexpr bool kSlowHalves = false;
constexpr int kMaxFloatTokens = 8;
using RowsAtOnce = std::integer_sequence<int, 1>;  // of a product of one group; of several see dense/groups_avx512.cc

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
inline void store_i8(int8_t* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v));
}
inline F load_f16(const void* p) { return {_mm512_cvtph_ps(load256(p))}; }
inline float half_at(const void* p) {
  uint16_t h;
  __builtin_memcpy(&h, p, 2);
  return _cvtsh_ss(h);
}
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
// As integers the bits of magnitudes are in the same order, with NaN above all.
inline float largest_magnitude(F x, F y) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  const __m512i a = _mm512_and_si512(_mm512_castps_si512(x.v), mask), b = _mm512_and_si512(_mm512_castps_si512(y.v), mask);
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)))));
}

#include "simd/whole_slices.inl"

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
typedef int32_t Four __attribute__((may_alias, aligned(1)));

// Four bytes in every lane. In words that GCC cannot merge: it would read the four again for each product.
SPECSPARSE_INLINE __m512i spread(const void* four) {
  __m512i v;
  asm("vpbroadcastd %1, %0" : "=v"(v) : "m"(*static_cast<const Four*>(four)));
  return v;
}

// dot += products of unsigned codes, four columns of x from `at` on. A vector alone takes the four from memory itself; several
// share what is spread once, since the processor multiplies two vectors in the time it reads one.
template <int NT, int WIDE>
SPECSPARSE_INLINE void add_products(SI (*dot)[NT], const __m512i* code, const QBlock* x, int at) {
  each<NT>([&](auto t) SPECSPARSE_EACH {
    const int8_t* four = x[t].q + at;
    if constexpr (WIDE == 1) {
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dot[0][t].v) : "v"(code[0]), "m"(*reinterpret_cast<const Four*>(four)));
    } else {
      const __m512i q = spread(four);
      each<WIDE>([&](auto v) SPECSPARSE_EACH { asm("vpdpbusd %2, %1, %0" : "+v"(dot[v][t].v) : "v"(code[v]), "v"(q)); });
    }
  });
}

// Sums that begin at first(token), a vector.
template <int NT, int WIDE, class First>
SPECSPARSE_INLINE void start(SI (*dot)[NT], First first) {
  each<NT>([&](auto t) SPECSPARSE_EACH {
    const __m512i value = first(t);
    each<WIDE>([&](auto v) SPECSPARSE_EACH { dot[v][t].v = value; });
  });
}

// Nibbles through `value`, which gives unsigned bytes.
template <int NT, int WIDE, class Value>
SPECSPARSE_INLINE void add_nibbles(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], Value value) {
  const __m512i mask = _mm512_set1_epi8(15);
  each<4>([&](auto c) SPECSPARSE_EACH {
    each<2>([&](auto high) SPECSPARSE_EACH {
      __m512i code[WIDE];
      each<WIDE>([&](auto v) SPECSPARSE_EACH {
        const __m512i both = load512(w[v] + 64 * c);
        code[v] = value(_mm512_and_si512(high ? _mm512_srli_epi16(both, 4) : both, mask));
      });
      add_products<NT, WIDE>(dot, code, x, 16 * high + 4 * c);
    });
  });
}

template <int NT, int WIDE>
SPECSPARSE_INLINE void dot_codes(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], int32_t zero) {
  start<NT, WIDE>(dot, [&](int t) SPECSPARSE_EACH { return _mm512_set1_epi32(-zero * x[t].sum); });
  add_nibbles<NT, WIDE>(w, x, dot, [](__m512i v) SPECSPARSE_EACH { return v; });
}

// VNNI wants unsigned weights: the table is shifted by 128, which 128 * sum(x) takes back.
template <int NT, int WIDE>
SPECSPARSE_INLINE void dot_table(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], const int8_t* lut) {
  const __m512i table = _mm512_xor_si512(_mm512_broadcast_i32x4(load128(lut)), _mm512_set1_epi8(-128));
  start<NT, WIDE>(dot, [&](int t) SPECSPARSE_EACH { return spread(&x[t].less[0]); });
  add_nibbles<NT, WIDE>(w, x, dot, [&](__m512i v) SPECSPARSE_EACH { return _mm512_shuffle_epi8(table, v); });
}

// int8 codes of `CHUNKS` chunks of four columns from chunk FIRST on: the block or half of it.
template <int NT, int WIDE, int CHUNKS, int FIRST>
SPECSPARSE_INLINE void dot_int8(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT]) {
  const __m512i flip = _mm512_set1_epi8(-128);
  start<NT, WIDE>(dot, [&](int t) SPECSPARSE_EACH { return spread(&x[t].less[CHUNKS == 8 ? 0 : 1 + FIRST / 4]); });
  each<CHUNKS>([&](auto c) SPECSPARSE_EACH {
    __m512i code[WIDE];
    each<WIDE>([&](auto v) SPECSPARSE_EACH { code[v] = _mm512_xor_si512(load512(w[v] + 64 * (FIRST + c)), flip); });
    add_products<NT, WIDE>(dot, code, x, 4 * (FIRST + c));
  });
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
