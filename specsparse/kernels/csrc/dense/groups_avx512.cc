// Products of several groups of weights with many rows of activations, for AVX-512.
//
// A processor of this kind multiplies two vectors a cycle and reads one. So four activations, spread over a vector, serve
// kGroups groups of weights; the sums of a block fill the registers, and results wait in memory, which a block reads and
// writes once. Columns are gone through piece by piece, so that a piece of the weights stays in the first cache for all rows.
#define SPECSPARSE_ISA avx512_groups
#include <cstring>

#include "simd/kinds.h"
#include "simd/simd_avx512.h"

namespace specsparse {
namespace {

constexpr int kGroups = kGroupsAtOnce;
constexpr int64_t kPiece = 16;  // blocks, whole super-blocks
constexpr int64_t kAhead = 2048;  // bytes of each group that are fetched meanwhile
constexpr int kFew = 4;            // two rows and three are multiplied like four

typedef int32_t Four __attribute__((may_alias, aligned(1)));

// Both in words that GCC cannot merge: it would read the four again for each product.
SPECSPARSE_INLINE __m512i spread(const void* four) {
  __m512i v;
  asm("vpbroadcastd %1, %0" : "=v"(v) : "m"(*static_cast<const Four*>(four)));
  return v;
}
SPECSPARSE_INLINE void add_products(__m512i& sum, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
}

// y[g][t][16] += products of `blocks` blocks, of which those of the first group begin at `first`; returns where the next one
// does. `end` is the end of that group, null where nothing need be fetched.
template <Read READ, Scales SCALES, int SUBS, int NT>
__attribute__((flatten)) const uint8_t* multiply(const Matrix& w, const uint8_t* first, int64_t blocks, const QBlock* q, int64_t tile,
                                                 const uint8_t* end, float* y) {
  constexpr bool kMins = SCALES == Scales::kDm || SCALES == Scales::kSuperMin;
  constexpr bool kHeader = SCALES == Scales::kSuper || SCALES == Scales::kSuperMin;
  constexpr bool kHalves = SCALES == Scales::kD || SCALES == Scales::kDm;
  constexpr int kCodeBytes = kRows * kBlock / (READ == Read::kInt8 ? 1 : 2);
  constexpr int kLines = kCodeBytes / 64 + 1;
  const uint8_t* p[kGroups];
  each<kGroups>([&](auto g) SPECSPARSE_EACH { p[g] = first + g * w.group_bytes; });
  const auto skip = [&](int64_t bytes) SPECSPARSE_EACH { each<kGroups>([&](auto g) SPECSPARSE_EACH { p[g] += bytes; }); };
  const __m512i mask = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-128);
  const __m512i table = READ == Read::kTable ? _mm512_xor_si512(_mm512_broadcast_i32x4(load128(w.lut)), flip) : flip;
  F super_d[kGroups] = {}, super_m[kGroups] = {};
  for (int64_t b = 0; b < blocks; ++b, q += tile) {
    if (kHeader && b % (kSuper / kBlock) == 0) {
      each<kGroups>([&](auto g) SPECSPARSE_EACH {
        super_d[g] = load_f16(p[g]);
        if (kMins) super_m[g] = load_f16(p[g] + 32);
      });
      skip(kMins ? 64 : 32);
    }
    constexpr int kScaleBytes = SCALES == Scales::kF32 || SCALES == Scales::kDm ? 64 : kHalves ? 32 : 16;
    constexpr int kCodes = SUBS * (kScaleBytes + (SCALES == Scales::kSuperMin ? 16 : 0));  // where they begin
    if (end) {
      const int64_t ahead = kAhead + (p[0] + kAhead < end ? 0 : (kGroups - 1) * w.group_bytes);
      each<kGroups>([&](auto g) SPECSPARSE_EACH {
        each<kLines>([&](auto line) SPECSPARSE_EACH { __builtin_prefetch(p[g] + ahead + 64 * line); });
      });
    }
    each<SUBS>([&](auto u) SPECSPARSE_EACH {
      __m512i sum[kGroups][NT];
      each<NT>([&](auto t) SPECSPARSE_EACH {
        if (READ != Read::kCodes)
          sum[0][t] = spread(&q[t].less[SUBS == 1 ? 0 : 1 + u]);
        else if (SCALES == Scales::kD)
          sum[0][t] = _mm512_set1_epi32(-w.zero * q[t].sum);
        else
          sum[0][t] = _mm512_setzero_si512();
        each<kGroups - 1>([&](auto g) SPECSPARSE_EACH { sum[g + 1][t] = sum[0][t]; });
      });
      if constexpr (READ == Read::kInt8) {
        constexpr int kChunks = 8 / SUBS;
        each<kChunks>([&](auto i) SPECSPARSE_EACH {
          constexpr int c = kChunks * u + i;
          __m512i code[kGroups];
          each<kGroups>([&](auto g) SPECSPARSE_EACH { code[g] = _mm512_xor_si512(load512(p[g] + kCodes + 64 * c), flip); });
          each<NT>([&](auto t) SPECSPARSE_EACH {
            const __m512i four = spread(q[t].q + 4 * c);
            each<kGroups>([&](auto g) SPECSPARSE_EACH { add_products(sum[g][t], code[g], four); });
          });
        });
      } else {
        each<4>([&](auto c) SPECSPARSE_EACH {
          each<2>([&](auto high) SPECSPARSE_EACH {
            __m512i code[kGroups];
            each<kGroups>([&](auto g) SPECSPARSE_EACH {
              const __m512i both = load512(p[g] + kCodes + 64 * c);
              code[g] = _mm512_and_si512(high ? _mm512_srli_epi16(both, 4) : both, mask);
              if (READ == Read::kTable) code[g] = _mm512_shuffle_epi8(table, code[g]);
            });
            each<NT>([&](auto t) SPECSPARSE_EACH {
              const __m512i four = spread(q[t].q + 16 * high + 4 * c);
              each<kGroups>([&](auto g) SPECSPARSE_EACH { add_products(sum[g][t], code[g], four); });
            });
          });
        });
      }
      F d[kGroups], m[kGroups];
      each<kGroups>([&](auto g) SPECSPARSE_EACH {
        const uint8_t* at = p[g] + u * kScaleBytes;
        if (SCALES == Scales::kF32) d[g] = load(reinterpret_cast<const float*>(at));
        if (kHalves) d[g] = load_f16(at);
        if (SCALES == Scales::kDm) m[g] = load_f16(at + 32);
        if (kHeader) d[g] = mul(super_d[g], load_i8(at));
        if (SCALES == Scales::kSuperMin) m[g] = sub(zero(), mul(super_m[g], load_u8(at + 16 * SUBS)));
      });
      each<NT>([&](auto t) SPECSPARSE_EACH {
        const F scale = {_mm512_castsi512_ps(spread(&q[t].scale))};
        F shift;
        if (kMins) shift = {_mm512_castsi512_ps(spread(SUBS == 1 ? &q[t].shift : &q[t].shifts[u]))};
        each<kGroups>([&](auto g) SPECSPARSE_EACH {
          float* to = y + kRows * (g * kGroupTile + t);
          F acc = fma(mul(d[g], scale), to_float({sum[g][t]}), load(to));
          if (kMins) acc = fma(m[g], shift, acc);
          store(to, acc);
        });
      });
      asm volatile("" : : : "memory");  // results stay where they are: GCC would copy them to the stack
    });
    skip(kCodes + kCodeBytes);
  }
  return p[0];
}

template <Read READ, Scales SCALES, int SUBS>
void multiply_all(const Matrix& w, const uint8_t* p, const Activations& x, int64_t row, int tokens, float* y) {
  constexpr int kTileFloats = kGroups * kGroupTile * kRows;
  const int tiles = (tokens + kGroupTile - 1) / kGroupTile;
  std::memset(y, 0, sizeof(float) * kTileFloats * tiles);
  const uint8_t* const end = p + w.group_bytes;
  for (int64_t b = 0; b < x.blocks; b += kPiece) {
    const int64_t blocks = x.blocks - b < kPiece ? x.blocks - b : kPiece;
    const uint8_t* next = p;
    for (int i = 0; i < tiles; ++i) {
      const int left = tokens - i * kGroupTile;
      const auto call = left > kFew ? multiply<READ, SCALES, SUBS, kGroupTile>
                        : left > 1  ? multiply<READ, SCALES, SUBS, kFew>
                                    : multiply<READ, SCALES, SUBS, 1>;
      next = call(w, p, blocks, x.at(row + i * kGroupTile, b), x.tile, i ? nullptr : end, y + kTileFloats * i);
    }
    p = next;
  }
}

}  // namespace

bool dot_groups_avx512(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  if (w.is_float() || x.tile < (tokens > kFew ? kGroupTile : tokens > 1 ? kFew : 1)) return false;
  const uint8_t* group = w.data + g * w.group_bytes;
  return with_kind(w, [&](auto kind) SPECSPARSE_EACH {
    using K = decltype(kind);
    multiply_all<K::kRead, K::kScales, K::kSubs>(w, group, x, row, tokens, y);
  });
}

}  // namespace specsparse
