// Look-ups by AVX2's byte shuffle: what the table kernels need beyond simd_avx2.h.
#pragma once

#include "lut/lut.h"
#include "simd/simd_avx2.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// One step of `look_up`: adds the entries that `index` chooses, to bytes (kInt6; high bytes of kExact) or to words.
// FIRST: the sum begins here; LAST: bytes are widened here, before the next four could overflow them.
template <Sums KIND, bool FIRST, bool START, bool LAST>
SPECSPARSE_INLINE void add_entries(__m256i index, __m256i low, __m256i high, __m256i weights, __m256i* words, __m256i* bytes) {
  __m256i entries = _mm256_shuffle_epi8(low, index);
  if constexpr (KIND == Sums::kInt6) {
    entries = *bytes = START ? entries : pinned(_mm256_add_epi8(*bytes, entries));
    if (!LAST) return;
  }
  const __m256i pairs = _mm256_maddubs_epi16(weights, entries);
  *words = FIRST ? pairs : pinned(_mm256_add_epi16(*words, pairs));
  if constexpr (KIND == Sums::kExact) {
    const __m256i upper = _mm256_shuffle_epi8(high, index);
    *bytes = FIRST ? upper : pinned(_mm256_add_epi8(*bytes, upper));
  }
}

// dot[s][t] = sum over quads and bits of 2^bit * the entry that the bits of each row choose. Bounds: an entry's byte is at
// least -128, so a word is at least (4 + 8) * 8 * -128; the high bytes of eight exact entries add up to 16 at most.
template <Sums KIND, int NT, int SLICES>
SPECSPARSE_INLINE void look_up(const uint8_t* w, const uint8_t* const* x, SI (*dot)[NT]) {
  const __m256i mask = _mm256_set1_epi8(15), weights = _mm256_set1_epi32(0x08040201);
  __m256i words[SLICES][NT], bytes[SLICES][NT];
  each<4>([&](auto c) SPECSPARSE_EACH {
    __m256i codes[SLICES];
    each<SLICES>([&](auto s) SPECSPARSE_EACH { codes[s] = pinned(load256(w + 64 * c + 32 * s)); });
    each<2>([&](auto high) SPECSPARSE_EACH {
      constexpr bool kStart = c % 2 == 0 && high == 0, kLast = c % 2 == 1 && high == 1;
      constexpr bool kFirst = KIND == Sums::kInt6 ? c == 1 : c == 0 && high == 0;
      __m256i index[SLICES];
      each<SLICES>([&](auto s) SPECSPARSE_EACH { index[s] = _mm256_and_si256(high ? _mm256_srli_epi16(codes[s], 4) : codes[s], mask); });
      each<NT>([&](auto t) SPECSPARSE_EACH {
        const uint8_t* table = x[t] + 16 * (4 * high + c);
        const __m256i low = _mm256_broadcastsi128_si256(load128(table));
        const __m256i upper = KIND == Sums::kExact ? _mm256_broadcastsi128_si256(load128(table + kTableBytes)) : low;
        each<SLICES>([&](auto s) SPECSPARSE_EACH {
          add_entries<KIND, kFirst, kStart, kLast>(index[s], low, upper, weights, &words[s][t], &bytes[s][t]);
        });
      });
    });
  });
  each<SLICES>([&](auto s) SPECSPARSE_EACH {
    each<NT>([&](auto t) SPECSPARSE_EACH {
      dot[s][t] = {_mm256_madd_epi16(words[s][t], _mm256_set1_epi16(1))};
      if constexpr (KIND == Sums::kExact) {
        const __m256i upper = _mm256_madd_epi16(_mm256_maddubs_epi16(weights, bytes[s][t]), _mm256_set1_epi16(256));
        dot[s][t].v = _mm256_add_epi32(dot[s][t].v, upper);
      }
    });
  });
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
