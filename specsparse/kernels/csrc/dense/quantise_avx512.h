// Rows of activations quantised sixteen blocks at a time, for AVX-512: the scales of sixteen blocks are one vector, and no block
// waits for another. The bits are those of quantise_block (elements.inl).
#pragma once

#include <immintrin.h>

#include "simd/ops.h"
#include "simd/unroll.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// The largest of each of sixteen vectors of magnitudes: lane i is of v[i]. As integers, where NaN is above all.
inline __m512 maxima(const __m512i* v) {
  __m512i a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    const int low = i % 4 + 8 * (i / 4);
    a[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(v[low], v[low + 4], 0x44), _mm512_shuffle_i32x4(v[low], v[low + 4], 0xEE));
  }
  for (int i = 0; i < 4; ++i)
    b[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD));
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(b[2 * i], b[2 * i + 1]), _mm512_unpackhi_epi32(b[2 * i], b[2 * i + 1]));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_unpacklo_epi64(c[0], c[1]), _mm512_unpackhi_epi64(c[0], c[1])));
}

// Block i of x goes to out[i * stride].
inline void quantise_row(const float* x, int64_t blocks, QBlock* out, int64_t stride) {
  constexpr int kSome = 16;
  const __m512 top = _mm512_set1_ps(127.0f);
  // Of fours of columns, after both packings, which work in each quarter of a vector: a0 b0 a0 b0 a1 b1 and so on.
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m128i less = _mm_setr_epi32(1, -128, -128, -128);
  for (int64_t first = 0; first < blocks; first += kSome) {
    const int some = blocks - first < kSome ? static_cast<int>(blocks - first) : kSome;
    __m512i v[kSome];
    for (int i = 0; i < kSome; ++i) {
      const float* from = x + kBlock * (i < some ? i : 0);
      const __m512 a = _mm512_abs_ps(_mm512_loadu_ps(from)), b = _mm512_abs_ps(_mm512_loadu_ps(from + 16));
      v[i] = _mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b));
    }
    const __m512 largest = maxima(v);
    alignas(64) float scale[kSome], inverse[kSome];
    _mm512_store_ps(scale, _mm512_div_ps(largest, top));
    const __mmask16 some_left = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_GT_OQ);
    _mm512_store_ps(inverse, _mm512_maskz_div_ps(some_left, top, largest));
    for (int i = 0; i < some; ++i, x += kBlock, out += stride) {
      const __m512 times = _mm512_set1_ps(inverse[i]);
      const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), times));
      const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), times));
      const __m512i halves = _mm512_packs_epi32(a, b), bytes = _mm512_packs_epi16(halves, halves);
      const __m256i q = _mm512_castsi512_si256(_mm512_permutexvar_epi32(in_order, bytes));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->q), q);
      // Of the bytes + 128, eight by eight: two of each half.
      const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
      const __m128i low = _mm256_castsi256_si128(sums), high = _mm256_extracti128_si256(sums, 1);
      const __m128i both = _mm_sub_epi32(_mm_add_epi32(_mm_unpacklo_epi64(low, high), _mm_unpackhi_epi64(low, high)),
                                         _mm_set1_epi64x(16 * 128));  // [half, 0, half, 0]
      const __m128i all = _mm_add_epi32(both, _mm_shuffle_epi32(both, 0x4E));
      const __m128i pair = _mm_shuffle_epi32(both, 0x88);                           // [first, second, first, second]
      const __m128i parts = _mm_unpacklo_epi64(_mm_unpacklo_epi32(all, all), pair);  // [sum, sum, first, second]
      const __m128 ones = _mm_blend_ps(_mm_cvtepi32_ps(parts), _mm_set1_ps(1.0f), 1);
      _mm_storeu_ps(&out->scale, _mm_mul_ps(ones, _mm_set1_ps(scale[i])));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(&out->sum), _mm_mullo_epi32(parts, less));
    }
  }
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
