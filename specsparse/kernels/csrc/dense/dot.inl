// Integer products of groups of rows, written once over the vectors of the simd_*.h that was included before.
//
// Several groups are gone through side by side: memory gives more to several streams than to one. Sums of a block are held by
// the registers, results wait in the first cache, where a block reads and writes them once. More rows of activations than a
// call takes come piece by piece of the columns, so that a piece of the weights stays in the first cache for all of them.
#pragma once

#include <algorithm>
#include <utility>

#include "dense/scales.inl"
#include "simd/kinds.h"
#include "simd/ops.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

constexpr int kSlices = kRows / kSlice;
constexpr int64_t kPiece = 16;           // blocks, whole super-blocks
constexpr int64_t kAhead = 16 / kSlices;  // blocks further on that a single call fetches: wider vectors are there sooner

// Of `blocks` blocks of a group.
template <class Kind>
constexpr int64_t bytes_of(int64_t blocks) {
  return blocks * Kind::kBytes + blocks / (kSuper / kBlock) * Kind::kHeaderBytes;
}

// A pointer that GCC knows nothing of: it would compute all addresses that depend on it before a loop, and keep them in memory.
template <class T>
SPECSPARSE_INLINE T* unknown(T* p) {
  asm("" : "+r"(p));
  return p;
}

// Which blocks of a piece a call fetches others for: calls take turns, so that memory is asked at an even rate.
struct Turn {
  int64_t first, step, ahead;  // ahead: in bytes, whole blocks, or what lies over a group's end would come too late
};

// y[group][row][16] += products of `blocks` blocks and NT rows of activations, or `passes` times NT if it REPEATS, of `count`
// groups, SIDE of them in registers at a time: acc = fma(fl(dw * dx), dot, acc), then for mins acc = fma(mw, fl(dx * sum), acc),
// block after block, sub after sub. `p` is where the first group's block begins, `end` where that group ends.
template <class Kind, int NT, int SIDE, bool REPEATS>
__attribute__((flatten)) void multiply(const Matrix& w, int count, const uint8_t* p, const uint8_t* end, int64_t blocks,
                                       const QBlock* x, int64_t tile, int passes, Turn turn, float* y) {
  constexpr int kWide = SIDE * kSlices;
  const int64_t stride = w.group_bytes;
  if (SIDE > 1) count = SIDE;
  Super super[kGroupsAtOnce][kSlices] = {};
  for (int64_t b = 0; b < blocks; ++b, x += tile, p += Kind::kBytes) {
    const bool header = Kind::kHeader && b % (kSuper / kBlock) == 0, fetch = b == turn.first;
    if (header) p += Kind::kHeaderBytes;
    if (fetch) turn.first += turn.step;
    // Of the same group, or of the next that is multiplied after these.
    const int64_t ahead = turn.ahead + (p + turn.ahead < end ? 0 : (count - 1) * stride);
    const uint8_t* group = p;
    for (int g = 0; g < count; g += SIDE, group += SIDE * stride) {
      float* to = y + kRows * kGroupTile * g;
      const uint8_t *block[SIDE], *codes[kWide];
      each<SIDE>([&](auto i) SPECSPARSE_EACH {
        block[i] = group + i * stride;
        if (fetch) {
          const uint8_t* from = block[i] + ahead - (header ? Kind::kHeaderBytes : 0);
          // To the second cache: a core has few places for lines on their way to the first.
          each<Kind::kLines + Kind::kHeader>([&](auto line) SPECSPARSE_EACH { __builtin_prefetch(from + 64 * line, 0, 2); });
        }
        each<kSlices>([&](auto s) SPECSPARSE_EACH {
          if (header) load_super<Kind>(block[i] - Kind::kHeaderBytes, kSlice * s, super[g + i][s]);
          codes[kSlices * i + s] = block[i] + Kind::kCodesAt + 4 * kSlice * s;
        });
      });
      for (int pass = 0; pass < (REPEATS ? passes : 1); ++pass, to += kRows * NT) {
        const QBlock* q = unknown(x + NT * pass);
        // Sub-block by sub-block, so that the sums of one are live at a time.
        each<Kind::kSubs>([&](auto u) SPECSPARSE_EACH {
          SI dot[kWide][NT];
          if constexpr (Kind::kRead == Read::kCodes) {
            dot_codes<NT, kWide>(codes, q, dot, Kind::kScales == Scales::kD ? w.zero : 0);
          } else if constexpr (Kind::kRead == Read::kTable) {
            dot_table<NT, kWide>(codes, q, dot, w.lut);
          } else {
            constexpr int kChunks = 8 / Kind::kSubs;
            dot_int8<NT, kWide, kChunks, kChunks * u>(codes, q, dot);
          }
          S d[kWide], m[kWide];
          each<kWide>([&](auto v) SPECSPARSE_EACH {
            constexpr int i = v / kSlices, s = v % kSlices;
            d[v] = scale_of<Kind, u>(block[i], kSlice * s, super[g + i][s]);
            if (Kind::kMins) m[v] = min_of<Kind, u>(block[i], kSlice * s, super[g + i][s]);
          });
          each<NT>([&](auto t) SPECSPARSE_EACH {
            const S scale = slice_set1(q[t].scale), shift = slice_set1(Kind::kSubs == 1 ? q[t].shift : q[t].shifts[u]);
            each<kWide>([&](auto v) SPECSPARSE_EACH {
              float* acc = to + kRows * (v / kSlices * kGroupTile + t) + kSlice * (v % kSlices);
              S sum = fma(mul(d[v], scale), to_float(dot[v][t]), slice_load(acc));
              if (Kind::kMins) sum = fma(m[v], shift, sum);
              store(acc, sum);
            });
          });
          asm volatile("" : : : "memory");  // results stay where they are: GCC would copy them to the stack
        });
      }
    }
  }
}

// y[kGroupTile rows][group][row of them][16] = products of `count` groups from g on. SIZES: rows that a call takes, ascending
// from 1; what a tile holds beyond the last row may be multiplied as well.
template <class Kind, int SIDE, int... SIZES>
void multiply_all(const Matrix& w, int64_t g, int count, const Activations& x, int64_t row, int tokens, float* y) {
  constexpr int kSizes[] = {SIZES...}, kMost = kSizes[sizeof...(SIZES) - 1];
  constexpr decltype(&multiply<Kind, 1, SIDE, false>) kCalls[] = {
      multiply<Kind, SIZES, SIDE, (2 * SIZES > kMost && kMost < kGroupTile)>...};
  const int most = static_cast<int>(std::min<int64_t>(kGroupTile, x.tile)), calls = (tokens + most - 1) / most;
  const int64_t piece = calls > 1 ? kPiece : x.blocks, ahead = bytes_of<Kind>(calls > 1 ? kPiece : kAhead);
  const uint8_t *p = w.data + g * w.group_bytes, *const end = p + w.group_bytes;
  for (int64_t b = 0; b < x.blocks; b += piece) {
    const int64_t blocks = std::min(piece, x.blocks - b);
    for (int i = 0; i < calls; ++i) {
      const int t = most * i, now = std::min(most, tokens - t), passes = (now + kMost - 1) / kMost;
      int size = 0;
      while (kSizes[size] * passes < now) ++size;
      float* to = y + kRows * (t / kGroupTile * kGroupTile * count + t % kGroupTile);
      if (b == 0)
        for (int j = 0; j < count; ++j) std::fill_n(to + kRows * kGroupTile * j, kRows * kSizes[size] * passes, 0.0f);
      kCalls[size](w, count, p, end, blocks, x.at(row + t, b), x.tile, passes, {i, calls, ahead}, to);
    }
    p += bytes_of<Kind>(blocks);
  }
}

// `count` groups, SIDE of them in registers at a time; false, with nothing written, where weights are floats.
template <int SIDE, int... SIZES>
bool dot_blocked(std::integer_sequence<int, SIZES...>, const Matrix& w, int64_t g, int count, const Activations& x, int64_t row,
                 int tokens, float* y) {
  return with_kind(w, [&](auto kind) SPECSPARSE_EACH { multiply_all<decltype(kind), SIDE, SIZES...>(w, g, count, x, row, tokens, y); });
}

}  // namespace
}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
