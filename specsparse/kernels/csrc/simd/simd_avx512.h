// Sixteen-lane vectors as one AVX-512 register, integer dot products by VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/ops.h"
#include "simd/simd_x86.h"
#include "simd/unroll.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

constexpr int kMaxTokens = 1;  // more rows take several groups at once (dense/groups_avx512.cc)
// Sums of attention that the registers hold, and queries that share what was widened for them.
constexpr int kScoreSums = 16, kValueSums = 16, kGroup = 8;
constexpr int kMaxFloatTokens = 8;

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

#include "simd/whole_slices.inl"

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
// sum + w * x, codes of w unsigned, the same four of x for each lane. GCC reads the four by an instruction of its own, which
// fills the front end before the multipliers are full: from eight rows on that is the limit.
inline __m512i dot4_add(__m512i sum, __m512i w, const int8_t* x) {
  typedef int32_t Four __attribute__((may_alias, aligned(1)));
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const Four*>(x)));
  return sum;
}

template <int NT, int SLICES>
SPECSPARSE_INLINE void dot_codes(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT], int32_t zero) {
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i acc[NT];
  if (zero)
    each<NT>([&](auto t) SPECSPARSE_EACH { acc[t] = _mm512_set1_epi32(-zero * x[t]->sum); });
  else
    each<NT>([&](auto t) SPECSPARSE_EACH { acc[t] = _mm512_setzero_si512(); });
  each<4>([&](auto c) SPECSPARSE_EACH {
    const __m512i both = load512(w + 64 * c);
    const __m512i low = _mm512_and_si512(both, mask), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    each<NT>([&](auto t) SPECSPARSE_EACH {
      acc[t] = dot4_add(acc[t], low, x[t]->q + 4 * c);
      acc[t] = dot4_add(acc[t], high, x[t]->q + 16 + 4 * c);
    });
  });
  each<NT>([&](auto t) SPECSPARSE_EACH { (*dot)[t].v = acc[t]; });
}

// VNNI wants unsigned weights: the table is shifted by 128, which 128 * sum(x) takes back.
template <int NT, int SLICES>
SPECSPARSE_INLINE void dot_table(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT], const int8_t* lut) {
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i table = _mm512_xor_si512(_mm512_broadcast_i32x4(load128(lut)), _mm512_set1_epi8(-128));
  __m512i acc[NT];
  each<NT>([&](auto t) SPECSPARSE_EACH { acc[t] = _mm512_set1_epi32(x[t]->less[0]); });
  each<4>([&](auto c) SPECSPARSE_EACH {
    const __m512i both = load512(w + 64 * c);
    const __m512i low = _mm512_shuffle_epi8(table, _mm512_and_si512(both, mask));
    const __m512i high = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask));
    each<NT>([&](auto t) SPECSPARSE_EACH {
      acc[t] = dot4_add(acc[t], low, x[t]->q + 4 * c);
      acc[t] = dot4_add(acc[t], high, x[t]->q + 16 + 4 * c);
    });
  });
  each<NT>([&](auto t) SPECSPARSE_EACH { (*dot)[t].v = acc[t]; });
}

// int8 codes of `CHUNKS` chunks of four columns from chunk FIRST on: the block or half of it.
template <int NT, int SLICES, int CHUNKS, int FIRST>
SPECSPARSE_INLINE void dot_int8(const uint8_t* w, const QBlock* const* x, SI (*dot)[NT]) {
  const __m512i flip = _mm512_set1_epi8(-128);
  __m512i acc[NT];
  each<NT>([&](auto t) SPECSPARSE_EACH { acc[t] = _mm512_set1_epi32(x[t]->less[CHUNKS == 8 ? 0 : 1 + FIRST / 4]); });
  each<CHUNKS>([&](auto c) SPECSPARSE_EACH {
    const __m512i wc = _mm512_xor_si512(load512(w + 64 * (FIRST + c)), flip);
    each<NT>([&](auto t) SPECSPARSE_EACH { acc[t] = dot4_add(acc[t], wc, x[t]->q + 4 * (FIRST + c)); });
  });
  each<NT>([&](auto t) SPECSPARSE_EACH { (*dot)[t].v = acc[t]; });
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
