// Sixty-four codes as two AVX2 registers: what the neuron kernels need beyond simd_avx2.h.
#define SPECSPARSE_ISA avx2
#include "simd/simd_avx2.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

constexpr int kFloatTokens = 2;  // rows of activations whose sums of floats fit the registers
constexpr int kBlockGroups = 1;  // groups of a matrix of blocks that are multiplied side by side
constexpr bool kGroups = false;  // SparseOps::groups

// Lane i of sixteen holds columns 4i .. 4i + 3.
struct Bytes {
  __m256i a, b;
};

inline Bytes load_bytes(const void* p) { return {load256(p), load256(static_cast<const char*>(p) + 32)}; }
inline Bytes load_nibbles(const void* p) {
  const __m256i both = load256(p), mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}
inline Bytes lookup(Bytes x, const int8_t* lut) {
  const __m256i table = _mm256_broadcastsi128_si256(load128(lut));
  return {_mm256_shuffle_epi8(table, x.a), _mm256_shuffle_epi8(table, x.b)};
}
inline Bytes magnitude(Bytes x) { return {_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)}; }
// Sums of four products each; m = magnitude(w).
inline I dot4(Bytes m, Bytes w, const int8_t* x) {
  return {dot4_signed(m.a, w.a, load256(x)), dot4_signed(m.b, w.b, load256(x + 32))};
}
// The same for codes that have no sign, added to sixteen sums or, where there are none, to 0.
inline I dot4_unsigned(const int32_t* sums, Bytes w, const int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1);
  const I found = {_mm256_madd_epi16(_mm256_maddubs_epi16(w.a, load256(x)), ones),
                   _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, load256(x + 32)), ones)};
  if (!sums) return found;
  return {_mm256_add_epi32(found.a, load256(sums)), _mm256_add_epi32(found.b, load256(sums + 8))};
}
// Codes of four bits as floats. The upper halves of the floats, which suffice for whole numbers up to 256, are looked up byte
// by byte; a lane of 128 bits has sixteen columns, and vector K its columns K % 2 + 0, 2, 4, 6 from column 8 * (K / 2) on.
constexpr int kNibbleChunks = 1;  // made floats together
struct NibbleTable {
  __m256i low, high;
  explicit NibbleTable(const uint16_t* halves) {
    const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5,
                                           7, 9, 11, 13, 15);
    const __m256i first = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load128(halves)), order);
    const __m256i second = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load128(halves + 8)), order);
    low = _mm256_unpacklo_epi64(first, second), high = _mm256_unpackhi_epi64(first, second);
  }
};
struct NibbleColumns {
  __m256i both;
  template <int K, int PART>
  S column(const NibbleTable& t) const {  // but for the last step, once for all K
    const __m256i codes = _mm256_and_si256(PART ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(t.low, codes), high = _mm256_shuffle_epi8(t.high, codes);
    const __m256i halves = K / 2 ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
    return {_mm256_castsi256_ps(K % 2 ? _mm256_and_si256(halves, _mm256_set1_epi32(-65536)) : _mm256_slli_epi32(halves, 16))};
  }
};
inline NibbleColumns load_columns(const uint8_t* p) { return {load256(p)}; }
inline NibbleColumns load_last_columns(const uint8_t* p) { return load_columns(p); }
constexpr int nibble_lane(int c) { return (c % 16 / 8 * 2 + c % 2) * 16 + c / 16 * 4 + c % 8 / 2; }
struct NibbleScales {
  S v;
  S of(int) const { return v; }
};
template <int PART>
inline NibbleScales nibble_scales(const float* s) {
  return {slice_set1(s[PART])};
}
// reduce_add of four at once: the same sums.
inline void reduce_add_four(const F* x, float* out) {
  const auto quarter = [](F v) {
    const __m256 t = _mm256_add_ps(v.a, v.b);
    return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  };
  sum_quarters(quarter(x[0]), quarter(x[1]), quarter(x[2]), quarter(x[3]), out);
}
// The scales of a chunk's 2 * SUBS sub-blocks, each in the lanes of its columns.
template <int SUBS>
inline F spread_scales(const float* s) {
  if (SUBS == 1) return {_mm256_broadcast_ss(s), _mm256_broadcast_ss(s + 1)};
  return {_mm256_set_m128(_mm_broadcast_ss(s + 1), _mm_broadcast_ss(s)),
          _mm256_set_m128(_mm_broadcast_ss(s + 3), _mm_broadcast_ss(s + 2))};
}

// to[i] and to[16 + i]: the codes of row i of four, without sign, at `offset`, times a in the low half of the bytes and times b in
// the high half. Sums of eight products fit 16 bits.
inline void chunk_sums(const uint8_t* const* rows, int64_t offset, const int8_t* a, const int8_t* b, int32_t* to) {
  const __m256i xa = load256(a), xb = load256(b), ones = _mm256_set1_epi16(1);
  __m256i va[4], vb[4];
  each<4>([&](auto i) SPECSPARSE_EACH {
    const Bytes w = load_nibbles(rows[i] + offset);
    va[i] = _mm256_maddubs_epi16(w.a, xa), vb[i] = _mm256_maddubs_epi16(w.b, xb);
  });
  const auto fours = [&](const __m256i* v) {
    return _mm256_madd_epi16(_mm256_hadd_epi16(_mm256_hadd_epi16(v[0], v[1]), _mm256_hadd_epi16(v[2], v[3])), ones);
  };
  const __m256i one = fours(va), two = fours(vb);
  const __m256i both = _mm256_add_epi32(_mm256_permute2x128_si256(one, two, 0x20), _mm256_permute2x128_si256(one, two, 0x31));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(both));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm256_extracti128_si256(both, 1));
}
inline I load_i(const int32_t* p) { return {load256(p), load256(p + 8)}; }

// Sums of 16 bits of a chunk of 64 columns: eight of columns 32 i + 8 k and of 32 i + 8 k + 16 are v[2 i + k].
struct Shorts {
  __m256i v[4];
};
inline Shorts set1_shorts(int16_t x) {
  const __m256i v = _mm256_set1_epi16(x);
  return {{v, v, v, v}};
}
// Adds the codes of two neurons, without sign, times the two bytes that `q` repeats.
inline void add_pair(const uint8_t* a, const uint8_t* b, int32_t q, Shorts* sums) {
  const __m256i mask = _mm256_set1_epi8(15), x = _mm256_set1_epi32(q), first = load256(a), second = load256(b);
  const __m256i both[2] = {_mm256_unpacklo_epi8(first, second), _mm256_unpackhi_epi8(first, second)};
  each<4>([&](auto i) SPECSPARSE_EACH {
    const __m256i codes = _mm256_and_si256(i / 2 ? _mm256_srli_epi16(both[i % 2], 4) : both[i % 2], mask);
    sums->v[i] = _mm256_add_epi16(sums->v[i], _mm256_maddubs_epi16(codes, x));
  });
}
// Columns 16 V and following.
template <int V>
inline I sixteen(const Shorts& x) {
  const auto half = [](__m256i v) { return _mm256_cvtepi16_epi32(_mm256_extracti128_si256(v, V % 2)); };
  return {half(x.v[V / 2 * 2]), half(x.v[V / 2 * 2 + 1])};
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse

#include "sparse/sparse.inl"

namespace specsparse {
const SparseOps kAvx2SparseOps = SPECSPARSE_SPARSE_TABLE;
}
