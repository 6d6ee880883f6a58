// Products of many rows by AMX: a tile of up to sixteen rows of activations times a block of sixteen rows of weights, whose
// integer sums are exact, so the bits are those of the other instruction sets.
//
// A packed block of int8 codes has the bytes of a tile already: row c is columns 4c .. 4c + 3 of sixteen rows of weights.
// Written once over `Tiles`: the processor's (dense/tiles.h), or those of tests in plain C++.
#pragma once

#include "dense/tiles.h"
#include "simd/simd_avx512.h"
#include "dense/scales.inl"

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

constexpr int kFewest = 4;  // rows of activations that tiles are worth
constexpr int kMostRows = kMostTile;
constexpr int kFirstA = 4, kFirstB = 6;  // tiles 0 to 3 are sums

// Shapes are set when they change and given back by `release`: a thread that holds tiles is dearer to switch.
template <class Tiles>
class Shapes {
 public:
  static void use(int rows, int subs) {
    if (held() == rows * 4 + subs) return;
    held() = rows * 4 + subs;
    TileShapes shapes;
    for (int t = 0; t < kFirstA; ++t) shapes.set(t, rows, 64);
    for (int t = kFirstA; t < kFirstB; ++t) shapes.set(t, rows, kBlock / subs);
    for (int t = kFirstB; t < kTiles; ++t) shapes.set(t, kBlock / subs / 4, 64);
    Tiles::configure(shapes);
  }
  static void release() {
    if (held()) Tiles::release();
    held() = 0;
  }

 private:
  static int& held() {
    thread_local int now = 0;
    return now;
  }
};

// The codes of a block as signed bytes in the order of a tile; int8 codes lie so already.
template <Read READ>
SPECSPARSE_INLINE const uint8_t* as_tile(const uint8_t* codes, const int8_t* lut, uint8_t* buffer) {
  if constexpr (READ == Read::kInt8) return codes;
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i table = READ == Read::kTable ? _mm512_broadcast_i32x4(load128(lut)) : mask;
  each<4>([&](auto c) SPECSPARSE_EACH {
    const __m512i both = load512(codes + 64 * c);
    __m512i low = _mm512_and_si512(both, mask), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    if (READ == Read::kTable) low = _mm512_shuffle_epi8(table, low), high = _mm512_shuffle_epi8(table, high);
    _mm512_store_si512(buffer + 64 * c, low);
    _mm512_store_si512(buffer + 64 * (4 + c), high);
  });
  return buffer;
}

// Rows of sums that no token has are read as well, and their results dropped.
struct alignas(64) Scratch {
  uint8_t unpacked[kRows * kBlock];
  int32_t sums[2][2][kMostRows][kRows];  // by turns: one block's are read while the next is multiplied
};

// `multiply` of dot.inl with the sums of a block's products from tiles. NT: rows of sums in registers, tokens <= NT.
template <class Tiles, class Kind, int NT>
__attribute__((flatten)) void dot_tiles(const Matrix& w, const uint8_t* p, const Activations& x, int64_t row, int tokens, float* y) {
  constexpr int kSubs = Kind::kSubs;
  thread_local Scratch scratch;
  uint8_t* const unpacked = scratch.unpacked;
  auto& sums = scratch.sums;
  const QBlock* at = x.at(row, 0);
  Shapes<Tiles>::use(tokens, kSubs);
  F acc[NT];
  Super super = {};
  each<NT>([&](auto t) SPECSPARSE_EACH { acc[t] = zero(); });
  const auto block = [&](int64_t b, auto turn) SPECSPARSE_EACH {
    if (Kind::kHeader && b % (kSuper / kBlock) == 0) load_super<Kind>(p, 0, super), p += Kind::kHeaderBytes;
    F d[kSubs], m[kSubs];
    each<kSubs>([&](auto u) SPECSPARSE_EACH {
      d[u] = scale_of<Kind, u>(p, 0, super);
      if (Kind::kMins) m[u] = min_of<Kind, u>(p, 0, super);
    });
    each<Kind::kLines>([&](auto line) SPECSPARSE_EACH { __builtin_prefetch(p + w.group_bytes + 64 * line); });
    const uint8_t* codes = as_tile<Kind::kRead>(p + Kind::kCodesAt, w.lut, unpacked);
    p += Kind::kBytes;
    each<kSubs>([&](auto u) SPECSPARSE_EACH {
      constexpr int kSums = 2 * turn + u, kA = kFirstA + (kSubs == 2 ? u : turn), kB = kFirstB + (kSubs == 2 ? u : turn);
      Tiles::template load<kB>(codes + u * 256, 64);
      Tiles::template load<kA>(at->q + u * 16, sizeof(QBlock));
      Tiles::template zero<kSums>();
      Tiles::template add_products<kSums, kA, kB>();
      Tiles::template store<kSums>(sums[turn][u], 64);
    });
    each<NT>([&](auto t) SPECSPARSE_EACH {
      const QBlock* q = at + (t < tokens ? t : tokens - 1);
      each<kSubs>([&](auto u) SPECSPARSE_EACH {
        I dot = {load512(sums[turn][u][t])};
        if (Kind::kRead == Read::kCodes) dot = add(dot, set1_i(-w.zero * q->sum));
        acc[t] = fma(mul(d[u], set1(q->scale)), to_float(dot), acc[t]);
        if (Kind::kMins) acc[t] = fma(m[u], set1(kSubs == 1 ? q->shift : q->shifts[u]), acc[t]);
      });
    });
    at += x.tile;
  };
  int64_t b = 0;
  for (; b + 2 <= x.blocks; b += 2) each<2>([&](auto turn) SPECSPARSE_EACH { block(b + turn, turn); });
  if (b < x.blocks) block(b, std::integral_constant<int, 0>{});
  each<NT>([&](auto t) SPECSPARSE_EACH {
    if (t < tokens) store(y + kRows * t, acc[t]);
  });
}

// `fewer` are the products of floats, and of few rows.
template <class Tiles>
void dot(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y,
         decltype(Ops::dot) fewer) {
  if (w.is_float() || tokens < kFewest) return fewer(w, g, x, row, tokens, y);
  const uint8_t* group = w.data + g * w.group_bytes;
  // Tiles of even size, so that none has fewer rows than the smallest there is.
  for (int done = 0, left = (tokens + kMostRows - 1) / kMostRows; left; --left) {
    const int now = (tokens - done + left - 1) / left;
    with_kind(w, [&](auto kind) SPECSPARSE_EACH {
      float* to = y + kRows * done;
      if (now <= 8)
        dot_tiles<Tiles, decltype(kind), 8>(w, group, x, row + done, now, to);
      else
        dot_tiles<Tiles, decltype(kind), kMostRows>(w, group, x, row + done, now, to);
    });
    done += now;
  }
}

}  // namespace
}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
