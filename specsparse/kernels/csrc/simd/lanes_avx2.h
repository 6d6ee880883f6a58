// Sixteen-lane vectors as two AVX2 registers: everything but the integer dot products.
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
constexpr int kScoreSums = 4, kValueSums = 4, kGroup = 6;
constexpr bool kSlowHalves = false;
constexpr int kMaxFloatTokens = 6;  // two registers of sums each, of 16
using RowsAtOnce = std::integer_sequence<int, 1, 2, 3, 4>;  // both slices of four rows are eight sums

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
inline F load_f16(const void* p) {
  const char* c = static_cast<const char*>(p);
  return {_mm256_cvtph_ps(load128(c)), _mm256_cvtph_ps(load128(c + 16))};
}
inline float half_at(const void* p) {
  uint16_t h;
  __builtin_memcpy(&h, p, 2);
  return _cvtsh_ss(h);
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
  // Two loads of eight bytes: the upper half of one load would need a shuffle more.
  const auto eight = [p](int at) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const char*>(p) + at)));
  };
  return to_float({eight(0), eight(8)});
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
// As integers the bits of magnitudes are in the same order, with NaN above all.
inline float largest_magnitude(F x, F y) {
  const auto bits = [](__m256 v) { return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff)); };
  const __m256i t = _mm256_max_epi32(_mm256_max_epi32(bits(x.a), bits(x.b)), _mm256_max_epi32(bits(y.a), bits(y.b)));
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xB1))));
}

constexpr int kSlice = 8;  // rows of a group that share a register
struct S {
  __m256 v;
};
struct SI {
  __m256i v;
};

inline S slice_zero() { return {_mm256_setzero_ps()}; }
inline S slice_set1(float x) { return {_mm256_set1_ps(x)}; }
inline S slice_load(const void* p) { return {_mm256_loadu_ps(static_cast<const float*>(p))}; }
inline S slice_f16(const void* p) { return {_mm256_cvtph_ps(load128(p))}; }
inline S slice_i8(const void* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))))};
}
inline S slice_u8(const void* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))))};
}
inline void store(float* p, S x) { _mm256_storeu_ps(p, x.v); }
inline S sub(S x, S y) { return {_mm256_sub_ps(x.v, y.v)}; }
inline S mul(S x, S y) { return {_mm256_mul_ps(x.v, y.v)}; }
inline S fma(S x, S y, S z) { return {_mm256_fmadd_ps(x.v, y.v, z.v)}; }
inline S to_float(SI x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline SI slice_minus(SI x, int32_t y) { return {_mm256_sub_epi32(x.v, _mm256_set1_epi32(y))}; }

inline __m256i spread(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

// Keeps a sum in its register. GCC would turn the chain into a tree and spill its leaves to the stack.
inline __m256i pinned(__m256i x) {
  asm("" : "+x"(x));
  return x;
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
