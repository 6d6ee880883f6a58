// What AVX2 and AVX-512 share. AVX-512's popcount is not in every processor that has VNNI, so it counts bits as AVX2 does.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace specsparse {
inline namespace SPECSPARSE_ISA {

inline __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

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
