// What AVX2 and AVX-512 share. AVX-512's popcount is not in every processor that has VNNI, so it counts bits as AVX2 does.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace specsparse {
inline namespace SPECSPARSE_ISA {

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Bit i: byte i of 32 is not 0.
inline uint32_t nonzero_bytes(const int8_t* p) {
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load256(p), _mm256_setzero_si256())));
}

// Sixteen halves of each of sixteen rows at `offset`, turned: out[16 b + i] is half b of row i.
inline void turn_halves(const uint8_t* const* rows, int64_t offset, float* out) {
  __m256i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = load256(rows[i] + offset);
  // Each round turns the bits of (register, place in its half) by one; after four the rows are the places.
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) t[2 * i] = _mm256_unpacklo_epi16(r[i], r[i + 8]), t[2 * i + 1] = _mm256_unpackhi_epi16(r[i], r[i + 8]);
    for (int i = 0; i < 16; ++i) r[i] = t[i];
  }
  const auto put = [](float* to, __m256i v) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm256_castsi256_si128(v)));
    _mm256_storeu_ps(to + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
  };
  for (int b = 0; b < 8; ++b) {
    put(out + 16 * b, _mm256_permute2x128_si256(r[2 * b], r[2 * b + 1], 0x20));
    put(out + 16 * (8 + b), _mm256_permute2x128_si256(r[2 * b], r[2 * b + 1], 0x31));
  }
}

// Four sums of four: out[i] = (x_i[0] + x_i[2]) + (x_i[1] + x_i[3]).
inline void sum_quarters(__m128 a, __m128 b, __m128 c, __m128 d, float* out) {
  const __m128 ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a)), cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
  _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
}

// Sum of sixteen signed bytes.
inline int32_t sum16(const int8_t* p) {
  const __m128i biased = _mm_xor_si128(load128(p), _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(biased, _mm_setzero_si128());  // of the bytes + 128, eight by eight
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

// Bits of kWordsAtOnce words that differ, by a table of the bits of four: its sums of bytes stay below 256.
constexpr int64_t kWordsAtOnce = 64;
inline int64_t count_differing(const uint64_t* a, const uint64_t* b) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2,
                                         3, 3, 4);
  __m256i bytes = _mm256_setzero_si256();
  for (int i = 0; i < kWordsAtOnce; i += 4) {
    __builtin_prefetch(b + i + 4 * kWordsAtOnce);
    const __m256i x = _mm256_xor_si256(load256(a + i), load256(b + i));
    const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(x, mask));
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), mask));
    bytes = _mm256_add_epi8(bytes, _mm256_add_epi8(low, high));
  }
  const __m256i sums = _mm256_sad_epu8(bytes, _mm256_setzero_si256());
  return _mm256_extract_epi64(sums, 0) + _mm256_extract_epi64(sums, 1) + _mm256_extract_epi64(sums, 2) +
         _mm256_extract_epi64(sums, 3);
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
