// Attention and the cache, written once over the vectors of the simd_*.h that was included before.
//
// A score is a chain over the head's dimensions and an output a chain over positions, whatever queries share a tile, so the
// order in which blocks of positions are visited, and the parts that threads make of them, change no bit.
#pragma once

#include <cmath>
#include <cstring>

#include "dense/elements.inl"
#include "simd/ops.h"
#include "simd/unroll.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

constexpr int kRest = 4;              // most queries beside groups of kGroup
constexpr int kChunk = kAttendChunk;  // positions that all queries read before the next ones
constexpr int kScaled = 32;           // elements of a q8_0 block
constexpr int kAheadBytes = 4096;     // of keys that are fetched: the processor's own fetching ends with a page

// Not std::max: a copy of it compiled for one instruction set could be linked into the code of another.
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Sixteen values of a cache at element `index`; codes of q8_0 are not scaled yet.
template <KvType TYPE>
SPECSPARSE_INLINE F load_kv(const void* base, int64_t index) {
  if constexpr (TYPE == KvType::kF32) return load(static_cast<const float*>(base) + index);
  if constexpr (TYPE == KvType::kQ8) return load_i8(static_cast<const int8_t*>(base) + index);
  const void* p = static_cast<const uint16_t*>(base) + index;
  return TYPE == KvType::kF16 ? load_f16(p) : load_bf16(p);
}

template <KvType TYPE>
constexpr int kBytes = TYPE == KvType::kF32 ? 4 : TYPE == KvType::kQ8 ? 1 : 2;  // of a value

// Asks for what lies at element `index`, which may be beyond the KV cache, into the processor's second cache (why: dot.inl).
// Not of float32, since that may be a copy in the caches.
template <KvType TYPE>
SPECSPARSE_INLINE void fetch(const void* base, int64_t index) {
  if constexpr (TYPE != KvType::kF32) __builtin_prefetch(static_cast<const char*>(base) + index * kBytes<TYPE>, 0, 2);
}

// Scales of sixteen positions: their low bytes, then their high bytes.
inline F load_split_f16(const uint8_t* p) {
  uint16_t halves[16];
  for (int i = 0; i < 16; ++i) halves[i] = static_cast<uint16_t>(p[i] | p[16 + i] << 8);
  return load_f16(halves);
}

// Elements of a row of a cache.
template <KvType TYPE>
constexpr SPECSPARSE_INLINE int64_t stored(int64_t d) {
  return TYPE == KvType::kQ8 ? d + d / (kScaled / 2) : d;
}

// f(i, vector) for the d vectors of sixteen positions of each of BLOCKS key blocks from `block` on.
template <KvType TYPE, int BLOCKS, class G>
SPECSPARSE_INLINE void each_key(const void* keys, int64_t block, int64_t d, G&& f) {
  constexpr int64_t kAhead = kAheadBytes / kBytes<TYPE>;
  constexpr int kLine = 4 / kBytes<TYPE>;  // vectors of a cache line
  const int64_t rows = stored<TYPE>(d);
  if constexpr (TYPE == KvType::kQ8) {
    for (int64_t i0 = 0; i0 < d; i0 += kScaled) {
      F scale[BLOCKS];
      each<BLOCKS>([&](auto b) SPECSPARSE_EACH {
        scale[b] = load_split_f16(static_cast<const uint8_t*>(keys) + ((block + b) * rows + d + i0 / (kScaled / 2)) * 16);
      });
      for (int64_t i = i0; i < i0 + kScaled; i += kLine)
        each<BLOCKS>([&](auto b) SPECSPARSE_EACH {
          const int64_t at = ((block + b) * rows + i) * 16;
          fetch<TYPE>(keys, at + kAhead);
          each<kLine>([&](auto l) SPECSPARSE_EACH { f(i + l, b, mul(scale[b], load_kv<TYPE>(keys, at + 16 * l))); });
        });
    }
  } else {
    for (int64_t i = 0; i < d; i += kLine)
      each<BLOCKS>([&](auto b) SPECSPARSE_EACH {
        const int64_t at = ((block + b) * rows + i) * 16;
        fetch<TYPE>(keys, at + kAhead);
        each<kLine>([&](auto l) SPECSPARSE_EACH { f(i + l, b, load_kv<TYPE>(keys, at + 16 * l)); });
      });
  }
}

// Scores of `BLOCKS` key blocks: lane = slot, each a chain over d. Block b's go to scores + j * stride + 16 b.
template <KvType TYPE, int NQ, int BLOCKS>
__attribute__((flatten)) void score_blocks(const void* keys, int64_t block, int64_t d, const float* const* queries, float* scores,
                                           int64_t stride) {
  F acc[BLOCKS][NQ];
  const float* q[NQ];
  each<NQ>([&](auto j) SPECSPARSE_EACH { q[j] = queries[j]; });
  each<BLOCKS>([&](auto b) SPECSPARSE_EACH { each<NQ>([&](auto j) SPECSPARSE_EACH { acc[b][j] = zero(); }); });
  each_key<TYPE, BLOCKS>(keys, block, d, [&](int64_t i, auto b, F k) SPECSPARSE_EACH {
    each<NQ>([&](auto j) SPECSPARSE_EACH { acc[b][j] = fma(k, set1(q[j][i]), acc[b][j]); });
  });
  each<BLOCKS>([&](auto b) SPECSPARSE_EACH { each<NQ>([&](auto j) SPECSPARSE_EACH { store(scores + j * stride + 16 * b, acc[b][j]); }); });
}

// As many blocks at a time as the registers hold, and more where there are few queries: a chain waits for itself.
template <KvType TYPE, int NQ>
void score_range(const void* keys, int64_t block, int64_t stop, int64_t d, const float* const* q, float* scores, int64_t stride) {
  constexpr int kBlocks = kScoreSums / NQ < 1 ? 1 : kScoreSums / NQ > 4 ? 4 : kScoreSums / NQ;
  if (kBlocks > 1)
    for (; block + kBlocks <= stop; block += kBlocks, scores += 16 * kBlocks) score_blocks<TYPE, NQ, kBlocks>(keys, block, d, q, scores, stride);
  for (; block < stop; ++block, scores += 16) score_blocks<TYPE, NQ, 1>(keys, block, d, q, scores, stride);
}

// Scale of a q8_0 block of a row of values.
inline float value_scale(const int8_t* row, int64_t d, int64_t column) {
  return half_at(row + d + column / kScaled * 2);
}

// Sixteen values of slot `slot`.
template <KvType TYPE>
SPECSPARSE_INLINE F value_at(const void* values, int64_t slot, int64_t d, int64_t column) {
  const int64_t row = slot * stored<TYPE>(d);
  const F v = load_kv<TYPE>(values, row + column);
  if constexpr (TYPE == KvType::kQ8) return mul(set1(value_scale(static_cast<const int8_t*>(values) + row, d, column)), v);
  return v;
}

// out[j] += p[j][i] * v[slot + i] for COLS * 16 columns from `column` on, i in order.
template <KvType TYPE, int NQ, int COLS>
__attribute__((flatten)) void weigh_columns(const void* values, int64_t slot, int64_t count, int64_t d, const float* p, int64_t stride,
                                            float* const* out, int64_t column) {
  F acc[COLS][NQ];
  each<COLS>([&](auto c) SPECSPARSE_EACH { each<NQ>([&](auto j) SPECSPARSE_EACH { acc[c][j] = load(out[j] + column + 16 * c); }); });
  for (int64_t i = 0; i < count; ++i) {
    F v[COLS];
    each<(COLS + 1) / 2>([&](auto c) SPECSPARSE_EACH {
      fetch<TYPE>(values, (slot + i + kChunk) * stored<TYPE>(d) + column + 32 * c);
    });
    if constexpr (TYPE == KvType::kQ8 && COLS % 2 == 0) {
      const int8_t* row = static_cast<const int8_t*>(values) + (slot + i) * stored<TYPE>(d);
      each<COLS / 2>([&](auto c) SPECSPARSE_EACH {
        const F scale = set1(value_scale(row, d, column + 32 * c));
        v[2 * c] = mul(scale, load_i8(row + column + 32 * c)), v[2 * c + 1] = mul(scale, load_i8(row + column + 32 * c + 16));
      });
    } else {
      each<COLS>([&](auto c) SPECSPARSE_EACH { v[c] = value_at<TYPE>(values, slot + i, d, column + 16 * c); });
    }
    each<NQ>([&](auto j) SPECSPARSE_EACH {
      const F weight = set1(p[j * stride + i]);
      each<COLS>([&](auto c) SPECSPARSE_EACH { acc[c][j] = fma(v[c], weight, acc[c][j]); });
    });
  }
  each<COLS>([&](auto c) SPECSPARSE_EACH { each<NQ>([&](auto j) SPECSPARSE_EACH { store(out[j] + column + 16 * c, acc[c][j]); }); });
}

template <KvType TYPE, int NQ>
void weigh_range(const void* values, int64_t slot, int64_t count, int64_t d, const float* p, int64_t stride, float* const* out,
                 int64_t column, int64_t end) {
  constexpr int kCols = kValueSums / NQ >= 4 ? 4 : kValueSums / NQ >= 2 ? 2 : 1;
  if (kCols > 1)
    for (; column + 16 * kCols <= end; column += 16 * kCols) weigh_columns<TYPE, NQ, kCols>(values, slot, count, d, p, stride, out, column);
  for (; column < end; column += 16) weigh_columns<TYPE, NQ, 1>(values, slot, count, d, p, stride, out, column);
}

// f(number of queries as a constant) for 1 to kRest queries.
template <class G>
SPECSPARSE_INLINE void with_queries(int count, G&& f) {
  switch (count) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    default: return f(std::integral_constant<int, 4>{});
  }
}

// f(first query, their number as a constant) over all queries of a tile.
template <class G>
SPECSPARSE_INLINE void each_group(int queries, G&& f) {
  int j = 0;
  for (; j + kGroup <= queries; j += kGroup) f(j, std::integral_constant<int, kGroup>{});
  for (; j < queries; j += kRest)
    with_queries(queries - j < kRest ? queries - j : kRest, [&](auto n) SPECSPARSE_EACH { f(j, n); });
}

// Widened copies of a chunk, in the order of a float32 cache.
template <KvType TYPE>
__attribute__((flatten)) void widen_keys(const void* keys, int64_t block, int64_t stop, int64_t d, float* to) {
  for (; block < stop; ++block, to += d * 16)
    each_key<TYPE, 1>(keys, block, d, [&](int64_t i, auto, F k) SPECSPARSE_EACH { store(to + i * 16, k); });
}

template <KvType TYPE>
__attribute__((flatten)) void widen_values(const void* values, int64_t slot, int64_t stop, int64_t d, int64_t first, int64_t end,
                                           float* to) {
  for (; slot < stop; ++slot, to += d)
    for (int64_t column = first; column < end; column += 16) {
      fetch<TYPE>(values, (slot + kChunk) * stored<TYPE>(d) + column);
      store(to + column, value_at<TYPE>(values, slot, d, column));
    }
}

// More than one group of queries share a widened copy, unless widening again costs less.
template <KvType TYPE>
bool copies(const AttendTile& t) {
  return (TYPE == KvType::kQ8 || (kSlowHalves && TYPE != KvType::kF32)) && t.queries > kGroup;
}

template <KvType TYPE>
void score_typed(const AttendTile& t, int64_t block, int64_t stop) {
  for (; block < stop; block += kChunk / 16) {
    const int64_t to = smaller(stop, block + kChunk / 16);
    const bool copy = copies<TYPE>(t);
    if (copy) widen_keys<TYPE>(t.k, block, to, t.d, t.copy);
    each_group(t.queries, [&](int j, auto n) SPECSPARSE_EACH {
      float* const scores = t.scores + j * t.stride + block * 16;
      if (copy) return score_range<KvType::kF32, n>(t.copy, 0, to - block, t.d, t.q + j, scores, t.stride);
      score_range<TYPE, n>(t.k, block, to, t.d, t.q + j, scores, t.stride);
    });
  }
}

// Weights are not divided by their sum yet. What lies beyond a path's end or before its window becomes 0.
void soften(const AttendTile& t, int j) {
  float* const s = t.scores + j * t.stride;
  // A path is ascending, so its scores move down without overwriting one that is still to be read.
  const int64_t first = t.first[j], start = first / 16 * 16;
  for (int64_t i = larger(first - t.shared, 0); i < t.tails[j]; ++i) s[t.shared + i] = s[t.tail[j][i]];
  const int64_t seen = t.shared + t.tails[j], padded = (seen + 15) / 16 * 16;
  for (int64_t i = start; i < first; ++i) s[i] = -INFINITY;
  for (int64_t i = seen; i < padded; ++i) s[i] = -INFINITY;
  F top = load(s + start);
  for (int64_t i = start + 16; i < padded; i += 16) top = max(top, load(s + i));
  const F most = set1(reduce_max(top));
  F sum = zero();
  for (int64_t i = start; i < padded; i += 16) {
    const F e = exp_below_88(sub(load(s + i), most));
    sum = add(sum, e);
    store(s + i, e);
  }
  s[t.stride - 1] = 1.0f / reduce_add(sum);
}

template <KvType TYPE>
void weigh_typed(const AttendTile& t, int64_t column, int64_t end) {
  for (int j = 0; j < t.queries; ++j) {
    for (int64_t c = column; c < end; c += 16) store(t.out[j] + c, zero());
    weigh_range<TYPE, 1>(t.v, t.first[j], t.common - t.first[j], t.d, t.scores + j * t.stride + t.first[j], t.stride, t.out + j, column, end);
  }
  for (int64_t slot = t.common; slot < t.shared; slot += kChunk) {
    const int64_t stop = smaller(t.shared, slot + kChunk), count = stop - slot;
    const bool copy = copies<TYPE>(t);
    if (copy) widen_values<TYPE>(t.v, slot, stop, t.d, column, end, t.copy);
    each_group(t.queries, [&](int j, auto n) SPECSPARSE_EACH {
      const float* const p = t.scores + j * t.stride + slot;
      if (copy) return weigh_range<KvType::kF32, n>(t.copy, 0, count, t.d, p, t.stride, t.out + j, column, end);
      weigh_range<TYPE, n>(t.v, slot, count, t.d, p, t.stride, t.out + j, column, end);
    });
  }
  for (int j = 0; j < t.queries; ++j) {
    const float* const p = t.scores + j * t.stride;
    for (int64_t i = larger(t.first[j] - t.shared, 0); i < t.tails[j]; ++i)
      weigh_range<TYPE, 1>(t.v, t.tail[j][i], 1, t.d, p + t.shared + i, t.stride, t.out + j, column, end);
    for (int64_t c = column; c < end; c += 16) store(t.out[j] + c, mul(load(t.out[j] + c), set1(p[t.stride - 1])));
  }
}

void score(const AttendTile& t, int64_t block, int64_t stop) {
  switch (t.type) {
    case KvType::kF32: return score_typed<KvType::kF32>(t, block, stop);
    case KvType::kF16: return score_typed<KvType::kF16>(t, block, stop);
    case KvType::kBf16: return score_typed<KvType::kBf16>(t, block, stop);
    case KvType::kQ8: return score_typed<KvType::kQ8>(t, block, stop);
  }
}

void weigh(const AttendTile& t, int64_t column, int64_t end) {
  switch (t.type) {
    case KvType::kF32: return weigh_typed<KvType::kF32>(t, column, end);
    case KvType::kF16: return weigh_typed<KvType::kF16>(t, column, end);
    case KvType::kBf16: return weigh_typed<KvType::kBf16>(t, column, end);
    case KvType::kQ8: return weigh_typed<KvType::kQ8>(t, column, end);
  }
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A block of 32 as q8_0: codes as activations have them, the scale as a half.
uint16_t code_block(const float* x, int8_t* codes) {
  QBlock block;
  quantise_block(x, &block);
  std::memcpy(codes, block.q, sizeof block.q);
  uint16_t half[16];
  store_f16(half, set1(block.scale));
  return half[0];
}

void store_q8(const float* k, const float* v, int64_t d, int64_t slot, int8_t* keys, int8_t* values) {
  const int64_t rows = stored<KvType::kQ8>(d);
  int8_t *key = keys + slot / 16 * rows * 16 + slot % 16, *value = values + slot * rows;
  int8_t codes[kScaled];
  for (int64_t i = 0; i < d; i += kScaled) {
    const int64_t scale = d + i / (kScaled / 2);
    const uint16_t of_key = code_block(k + i, codes);
    for (int l = 0; l < kScaled; ++l) key[(i + l) * 16] = codes[l];
    key[scale * 16] = static_cast<int8_t>(of_key & 255), key[(scale + 1) * 16] = static_cast<int8_t>(of_key >> 8);
    const uint16_t of_value = code_block(v + i, value + i);
    std::memcpy(value + scale, &of_value, 2);
  }
}

void store_kv(const float* k, const float* v, int64_t d, int64_t slot, KvType type, void* cache_k, void* cache_v) {
  if (type == KvType::kQ8) return store_q8(k, v, d, slot, static_cast<int8_t*>(cache_k), static_cast<int8_t*>(cache_v));
  const int64_t key = slot / 16 * d * 16 + slot % 16;
  if (type == KvType::kF32) {
    for (int64_t i = 0; i < d; ++i) static_cast<float*>(cache_k)[key + i * 16] = k[i];
    std::memcpy(static_cast<float*>(cache_v) + slot * d, v, d * sizeof(float));
    return;
  }
  uint16_t half[16];
  for (int64_t i = 0; i < d; i += 16) {
    uint16_t* out = static_cast<uint16_t*>(cache_v) + slot * d + i;
    if (type == KvType::kF16) {
      store_f16(half, load(k + i));
      store_f16(out, load(v + i));
    } else {
      for (int l = 0; l < 16; ++l) half[l] = to_bf16(k[i + l]), out[l] = to_bf16(v[i + l]);
    }
    for (int l = 0; l < 16; ++l) static_cast<uint16_t*>(cache_k)[key + (i + l) * 16] = half[l];
  }
}

}  // namespace
}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
