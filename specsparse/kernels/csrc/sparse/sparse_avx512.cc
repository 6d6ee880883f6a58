// Sixty-four codes as one AVX-512 register: what the neuron kernels need beyond simd_avx512.h.
#define SPECSPARSE_ISA avx512
#include "simd/simd_avx512.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

constexpr int kFloatTokens = 4;  // rows of activations whose sums of floats fit the registers
constexpr int kBlockGroups = 4;  // groups of a matrix of blocks that are multiplied side by side
constexpr bool kGroups = true;  // SparseOps::groups

// Lane i of sixteen holds columns 4i .. 4i + 3.
struct Bytes {
  __m512i v;
};

inline Bytes load_bytes(const void* p) { return {load512(p)}; }
inline Bytes load_nibbles(const void* p) {
  const __m512i low_and_high = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i halves = _mm512_srlv_epi16(_mm512_broadcast_i64x4(load256(p)), low_and_high);
  return {_mm512_and_si512(halves, _mm512_set1_epi8(15))};
}
inline Bytes lookup(Bytes x, const int8_t* lut) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load128(lut)), x.v)};
}
inline Bytes magnitude(Bytes x) { return {_mm512_abs_epi8(x.v)}; }
// Sums of four products each; m = magnitude(w). VNNI wants one unsigned factor, so x takes the sign of w.
inline I dot4(Bytes m, Bytes w, const int8_t* x) {
  const __m512i v = load512(x);
  const __m512i turned = _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(w.v), _mm512_setzero_si512(), v);
  return {_mm512_dpbusd_epi32(_mm512_setzero_si512(), m.v, turned)};
}
// The same for codes that have no sign, added to sixteen sums or, where there are none, to 0.
inline I dot4_unsigned(const int32_t* sums, Bytes w, const int8_t* x) {
  return {_mm512_dpbusd_epi32(sums ? load512(sums) : _mm512_setzero_si512(), w.v, load512(x))};
}
// Codes of four bits as floats: a lane of 32 bits has eight codes, of which a lookup reads the lowest. Loads that begin a byte
// later move the others there, and a shift every second one: two operations a vector where bytes would take two and a half.
constexpr int kNibbleChunks = 2;  // made floats together
struct NibbleTable {
  __m512 v;
  // The upper halves of the floats suffice for whole numbers up to 256.
  explicit NibbleTable(const uint16_t* halves) : v(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(halves)), 16))) {}
};
struct NibbleColumns {
  __m512i v[4];
  template <int K, int>
  F column(const NibbleTable& t) const {
    return {_mm512_permutexvar_ps(K % 2 ? _mm512_srli_epi32(v[K / 2], 4) : v[K / 2], t.v)};
  }
};
inline NibbleColumns load_columns(const uint8_t* p) { return {{load512(p), load512(p + 1), load512(p + 2), load512(p + 3)}}; }
// Of a single chunk; the upper lanes are not used.
inline NibbleColumns load_last_columns(const uint8_t* p) {
  const __m512i v = _mm512_zextsi256_si512(load256(p));
  return {{v, _mm512_srli_epi32(v, 8), _mm512_srli_epi32(v, 16), _mm512_srli_epi32(v, 24)}};
}
// Lane 8 h + l of vector 2 b + n has nibble n of byte 4 l + b of chunk h.
constexpr int nibble_lane(int c) { return (c % 4 * 2 + c % 64 / 32) * 16 + c / 64 * 8 + c % 32 / 4; }
// Scales of vectors of low and of high nibbles.
struct NibbleScales {
  F low, high;
  F of(int k) const { return k % 2 ? high : low; }
};
template <int>
inline NibbleScales nibble_scales(const float* s) {
  const __m512 v = _mm512_broadcast_f32x4(_mm_loadu_ps(s));
  return {{_mm512_permutevar_ps(v, _mm512_set_epi32(2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0))},
          {_mm512_permutevar_ps(v, _mm512_set_epi32(3, 3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1))}};
}
// reduce_add of four at once: the same sums.
inline void reduce_add_four(const F* x, float* out) {
  const auto quarter = [](F v) {
    const __m256 t = _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  };
  sum_quarters(quarter(x[0]), quarter(x[1]), quarter(x[2]), quarter(x[3]), out);
}
// The scales of a chunk's 2 * SUBS sub-blocks, each in the lanes of its columns.
template <int SUBS>
inline F spread_scales(const float* s) {
  if (SUBS == 1) {  // one load: wide ones are what bounds the products
    double both;
    __builtin_memcpy(&both, s, sizeof both);
    const __m512i order = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    return {_mm512_permutevar_ps(_mm512_castpd_ps(_mm512_set1_pd(both)), order)};
  }
  return {_mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
                                _mm512_castps128_ps512(_mm_loadu_ps(s)))};
}

// to[i] and to[16 + i]: the codes of row i of four, without sign, at `offset`, times a in the low half of the bytes and times b in
// the high half.
inline void chunk_sums(const uint8_t* const* rows, int64_t offset, const int8_t* a, const int8_t* b, int32_t* to) {
  const __m512i x = _mm512_inserti64x4(_mm512_castsi256_si512(load256(a)), load256(b), 1);
  __m512i v[4];
  each<4>([&](auto i) SPECSPARSE_EACH { v[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), load_nibbles(rows[i] + offset).v, x); });
  const __m512i one = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const __m512i two = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i fours = _mm512_add_epi32(_mm512_unpacklo_epi64(one, two), _mm512_unpackhi_epi64(one, two));
  const __m512i both = _mm512_add_epi32(fours, _mm512_shuffle_i32x4(fours, fours, 0xb1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(both));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_extracti32x4_epi32(both, 2));
}
inline I load_i(const int32_t* p) { return {_mm512_loadu_si512(p)}; }

// Sums of 16 bits of a chunk of 64 columns: eight of columns 32 i + 0, 16, 8, 24 are v[i].
struct Shorts {
  __m512i v[2];
};
inline Shorts set1_shorts(int16_t x) { return {{_mm512_set1_epi16(x), _mm512_set1_epi16(x)}}; }
// Adds the codes of two neurons, without sign, times the two bytes that `q` repeats.
inline void add_pair(const uint8_t* a, const uint8_t* b, int32_t q, Shorts* sums) {
  const __m512i mask = _mm512_set1_epi8(15), x = _mm512_set1_epi32(q);
  const __m256i first = load256(a), second = load256(b);
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_unpacklo_epi8(first, second)),
                                          _mm256_unpackhi_epi8(first, second), 1);
  each<2>([&](auto i) SPECSPARSE_EACH {
    const __m512i codes = _mm512_and_si512(i ? _mm512_srli_epi16(both, 4) : both, mask);
    sums->v[i] = _mm512_add_epi16(sums->v[i], _mm512_maddubs_epi16(codes, x));
  });
}
// Columns 16 V and following.
template <int V>
inline I sixteen(const Shorts& x) {
  const __m512i ordered = _mm512_shuffle_i64x2(x.v[V / 2], x.v[V / 2], 0xd8);
  return {_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(ordered, V % 2))};
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse

#include "sparse/sparse.inl"

namespace specsparse {
const SparseOps kAvx512SparseOps = SPECSPARSE_SPARSE_TABLE;
}
