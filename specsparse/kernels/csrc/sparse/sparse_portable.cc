// Sixty-four codes in plain C++: what the neuron kernels need beyond simd_portable.h.
#define SPECSPARSE_ISA portable
#include "simd/simd_portable.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

constexpr int kFloatTokens = 2;  // rows of activations whose sums of floats fit the registers
constexpr int kBlockGroups = 1;  // groups of a matrix of blocks that are multiplied side by side
constexpr bool kGroups = false;  // SparseOps::groups

// Lane i of sixteen holds columns 4i .. 4i + 3.
struct Bytes {
  int8_t v[64];
};

inline Bytes load_bytes(const void* p) {
  Bytes r;
  std::memcpy(r.v, p, 64);
  return r;
}
SPECSPARSE_SHARED Bytes load_nibbles(const void* p) {
  const uint8_t* b = static_cast<const uint8_t*>(p);
  Bytes r;
  for (int i = 0; i < 32; ++i) r.v[i] = b[i] & 15, r.v[32 + i] = b[i] >> 4;
  return r;
}
SPECSPARSE_SHARED Bytes lookup(Bytes x, const int8_t* lut) {
  for (int8_t& v : x.v) v = lut[v];
  return x;
}
inline const Bytes& magnitude(const Bytes& x) { return x; }  // only the others want it
// Sums of four products each.
SPECSPARSE_SHARED I dot4(const Bytes&, const Bytes& w, const int8_t* x) {
  I r{};
  for (int i = 0; i < 64; ++i) r.v[i / 4] += w.v[i] * x[i];
  return r;
}
// The same added to sixteen sums or, where there are none, to 0.
SPECSPARSE_SHARED I dot4_unsigned(const int32_t* sums, const Bytes& w, const int8_t* x) {
  I found = dot4(w, w, x);
  for (int i = 0; sums && i < 16; ++i) found.v[i] += sums[i];
  return found;
}
// Codes of four bits as floats, whose upper halves `halves` are; vector K of sixteen columns has K % 2 + 0, 2, 4, 6 from
// column 8 * (K / 2) on.
constexpr int kNibbleChunks = 1;  // made floats together
struct NibbleTable {
  const uint16_t* halves;
  explicit NibbleTable(const uint16_t* halves) : halves(halves) {}
};
SPECSPARSE_SHARED F lookup_floats(const int8_t* codes, int k, const uint16_t* halves) {
  F r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = static_cast<uint32_t>(halves[codes[i / 4 * 16 + k / 2 * 8 + i % 4 * 2 + k % 2]]) << 16;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
struct NibbleColumns {
  Bytes codes;
  template <int K, int>
  F column(const NibbleTable& t) const {
    return lookup_floats(codes.v, K, t.halves);
  }
};
inline NibbleColumns load_columns(const uint8_t* p) { return {load_nibbles(p)}; }
inline NibbleColumns load_last_columns(const uint8_t* p) { return load_columns(p); }
constexpr int nibble_lane(int c) { return (c % 16 / 8 * 2 + c % 2) * 16 + c / 16 * 4 + c % 8 / 2; }
// reduce_add of four.
inline void reduce_add_four(const F* x, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = reduce_add(x[i]);
}
// The scales of a chunk's 2 * SUBS sub-blocks, each in the lanes of its columns.
template <int SUBS>
SPECSPARSE_SHARED F spread_scales(const float* s) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = s[i * SUBS / 8];
  return r;
}

struct NibbleScales {
  F v;
  const F& of(int) const { return v; }
};
template <int>
inline NibbleScales nibble_scales(const float* s) {
  return {spread_scales<1>(s)};
}

// Bits of kWordsAtOnce words that differ.
constexpr int64_t kWordsAtOnce = 1;
inline int64_t count_differing(const uint64_t* a, const uint64_t* b) { return __builtin_popcountll(*a ^ *b); }

// to[i] and to[16 + i]: the codes of row i of four, without sign, at `offset`, times a in the low half of the bytes and times b in
// the high half.
SPECSPARSE_SHARED void chunk_sums(const uint8_t* const* rows, int64_t offset, const int8_t* a, const int8_t* b, int32_t* to) {
  for (int i = 0; i < 4; ++i) {
    int32_t one = 0, two = 0;
    for (int k = 0; k < 32; ++k) {
      const uint8_t both = rows[i][offset + k];
      one += (both & 15) * a[k], two += (both >> 4) * b[k];
    }
    to[i] = one, to[16 + i] = two;
  }
}
inline I load_i(const int32_t* p) {
  I r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}

// Sixteen halves of each of sixteen rows at `offset`, turned: out[16 b + i] is half b of row i.
SPECSPARSE_SHARED void turn_halves(const uint8_t* const* rows, int64_t offset, float* out) {
  for (int b = 0; b < 16; ++b) {
    uint16_t column[16];
    for (int i = 0; i < 16; ++i) std::memcpy(column + i, rows[i] + offset + 2 * b, 2);
    store(out + 16 * b, load_f16(column));
  }
}

// Sums of 16 bits of a chunk of 64 columns.
struct Shorts {
  uint16_t v[64];
};
inline Shorts set1_shorts(int16_t x) {
  Shorts r;
  for (uint16_t& v : r.v) v = static_cast<uint16_t>(x);
  return r;
}
// Adds the codes of two neurons, without sign, times the two bytes that `q` repeats.
SPECSPARSE_SHARED void add_pair(const uint8_t* a, const uint8_t* b, int32_t q, Shorts* sums) {
  const int first = static_cast<int8_t>(q), second = static_cast<int8_t>(q >> 8);
  for (int i = 0; i < 64; ++i) {
    const int high = i / 32 * 4;
    sums->v[i] = static_cast<uint16_t>(sums->v[i] + (a[i % 32] >> high & 15) * first + (b[i % 32] >> high & 15) * second);
  }
}
// Columns 16 V and following.
template <int V>
inline I sixteen(const Shorts& x) {
  I r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<int16_t>(x.v[16 * V + i]);
  return r;
}
// Bit i: byte i of 32 is not 0.
inline uint32_t nonzero_bytes(const int8_t* p) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(p[i] != 0) << i;
  return bits;
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse

#include "sparse/sparse.inl"

namespace specsparse {
const SparseOps kPortableSparseOps = SPECSPARSE_SPARSE_TABLE;
}
