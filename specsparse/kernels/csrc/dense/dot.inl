// Integer products of one group of rows, written once over the vectors of the simd_*.h that was included before.
#pragma once

#include <array>
#include <utility>

#include "simd/kinds.h"
#include "simd/ops.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

constexpr int kTile = 8;  // rows of activations that a call is best given

// acc = fma(fl(dw * dx), dot, acc), then for mins acc = fma(mw, fl(dx * sum), acc): block after block, sub after sub.
// `SLICES` slices of a group, from row `first` on.
template <Read READ, Scales SCALES, int SUBS, int NT, int SLICES>
__attribute__((flatten)) void dot_slices(const Matrix& w, const uint8_t* p, int first, const Activations& x, int64_t row,
                                         float* y) {
  constexpr bool kMins = SCALES == Scales::kDm || SCALES == Scales::kSuperMin;
  constexpr bool kHeader = SCALES == Scales::kSuper || SCALES == Scales::kSuperMin;
  constexpr int kCodeBytes = kRows * kBlock / (READ == Read::kInt8 ? 1 : 2);
  constexpr int kLines = kCodeBytes / 64 + 1;  // of a block and its scales
  constexpr int kParts = kRows / (kSlice * SLICES);  // calls that share a group
  const QBlock* at = x.at(row, 0);
  S acc[SLICES][NT], super_d[SLICES], super_m[SLICES];
  each<SLICES>([&](auto s) SPECSPARSE_EACH {
    each<NT>([&](auto t) SPECSPARSE_EACH { acc[s][t] = slice_zero(); });
    super_d[s] = slice_zero(), super_m[s] = slice_zero();
  });
  // This call's part of the next group is fetched meanwhile: reading from memory and computing overlap.
  const int64_t ahead = w.group_bytes + 64 * (first / (kSlice * SLICES));
  for (int64_t b = 0; b < x.blocks; ++b, at += x.tile) {
    if (kHeader && b % (kSuper / kBlock) == 0) {
      each<SLICES>([&](auto s) SPECSPARSE_EACH { super_d[s] = slice_f16(p + 2 * (first + kSlice * s)); });
      p += 32;
      if (kMins) {
        each<SLICES>([&](auto s) SPECSPARSE_EACH { super_m[s] = slice_f16(p + 2 * (first + kSlice * s)); });
        p += 32;
      }
    }
    S d[SUBS][SLICES], m[SUBS][SLICES];
    each<SUBS>([&](auto u) SPECSPARSE_EACH {
      constexpr bool kHalves = SCALES == Scales::kD || SCALES == Scales::kDm;
      each<SLICES>([&](auto s) SPECSPARSE_EACH {
        const int at = first + kSlice * s;
        if (SCALES == Scales::kF32) d[u][s] = slice_load(p + 4 * at);
        if (kHalves) d[u][s] = slice_f16(p + 2 * at);
        if (SCALES == Scales::kDm) m[u][s] = slice_f16(p + 32 + 2 * at);
        if (kHeader) d[u][s] = mul(super_d[s], slice_i8(p + at));
      });
      p += SCALES == Scales::kF32 || SCALES == Scales::kDm ? 64 : kHalves ? 32 : 16;
    });
    if (SCALES == Scales::kSuperMin)
      each<SUBS>([&](auto u) SPECSPARSE_EACH {
        each<SLICES>([&](auto s) SPECSPARSE_EACH { m[u][s] = sub(slice_zero(), mul(super_m[s], slice_u8(p + first + kSlice * s))); });
        p += 16;
      });
    each<(kLines + kParts - 1) / kParts>([&](auto line) SPECSPARSE_EACH { __builtin_prefetch(p + ahead + 64 * kParts * line); });
    const QBlock* q[NT];
    each<NT>([&](auto t) SPECSPARSE_EACH { q[t] = at + t; });
    const uint8_t* codes = p + 4 * first;
    // Sub-block by sub-block, so that the sums of one are live at a time.
    each<SUBS>([&](auto u) SPECSPARSE_EACH {
      SI dot[SLICES][NT];
      if constexpr (READ == Read::kCodes) {
        dot_codes<NT, SLICES>(codes, q, dot, w.zero);
      } else if constexpr (READ == Read::kTable) {
        dot_table<NT, SLICES>(codes, q, dot, w.lut);
      } else {
        constexpr int kChunks = 8 / SUBS;
        dot_int8<NT, SLICES, kChunks, kChunks * u>(codes, q, dot);
      }
      each<NT>([&](auto t) SPECSPARSE_EACH {
        const S scale = slice_set1(q[t]->scale), shift = slice_set1(SUBS == 1 ? q[t]->shift : q[t]->shifts[u]);
        each<SLICES>([&](auto s) SPECSPARSE_EACH {
          acc[s][t] = fma(mul(d[u][s], scale), to_float(dot[s][t]), acc[s][t]);
          if (kMins) acc[s][t] = fma(m[u][s], shift, acc[s][t]);
        });
      });
    });
    p += kCodeBytes;
  }
  each<NT>([&](auto t) SPECSPARSE_EACH { each<SLICES>([&](auto s) SPECSPARSE_EACH { store(y + 16 * t + first + kSlice * s, acc[s][t]); }); });
}

template <Read READ, Scales SCALES, int SUBS, int NT>
void dot_blocks(const Matrix& w, const uint8_t* group, const Activations& x, int64_t row, float* y) {
  constexpr int kAtOnce = slices_at_once(NT);
  for (int first = 0; first < kRows; first += kSlice * kAtOnce)
    dot_slices<READ, SCALES, SUBS, NT, kAtOnce>(w, group, first, x, row, y);
}

template <int NT>
void dot_tokens(const Matrix& w, const uint8_t* group, const Activations& x, int64_t row, float* y) {
  with_kind(w, [&](auto kind) SPECSPARSE_EACH {
    using Kind = decltype(kind);
    dot_blocks<Kind::kRead, Kind::kScales, Kind::kSubs, NT>(w, group, x, row, y);
  });
}

using DotTokens = void (*)(const Matrix&, const uint8_t*, const Activations&, int64_t, float*);

template <int... T>
constexpr std::array<DotTokens, sizeof...(T)> code_dots(std::integer_sequence<int, T...>) {
  return {dot_tokens<T + 1>...};
}

// Tiles of even size: six rows as 3 + 3 cost less than as 4 + 2.
template <size_t MOST>
void in_tiles(const std::array<DotTokens, MOST>& dots, const Matrix& w, const uint8_t* group, const Activations& x, int64_t row,
              int tokens, float* y) {
  const int tiles = (tokens + static_cast<int>(MOST) - 1) / static_cast<int>(MOST);
  for (int done = 0, left = tiles; left; --left) {
    const int now = (tokens - done + left - 1) / left;
    dots[now - 1](w, group, x, row + done, y + 16 * done);
    done += now;
  }
}

void dot_blocked(const Matrix& w, const uint8_t* group, const Activations& x, int64_t row, int tokens, float* y) {
  static constexpr auto kDots = code_dots(std::make_integer_sequence<int, kMaxTokens>());
  in_tiles(kDots, w, group, x, row, tokens, y);
}

}  // namespace
}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
