// The table kernels, written once over the lut_simd_*.h that was included before.
#include "lut/lut.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

// What entry i takes of activation k: bit k of i, as 0 and 1 or as -1 and 1. With signs a table is its own mirror image, so
// its largest magnitude, and with it the step it is rounded to, is the least.
struct Pattern {
  alignas(64) float v[4][16];
  constexpr explicit Pattern(float off) : v() {
    for (int k = 0; k < 4; ++k)
      for (int i = 0; i < 16; ++i) v[k][i] = i >> k & 1 ? 1.0f : off;
  }
};
constexpr Pattern kZeroOne(0.0f), kSigns(-1.0f);

// Sixteen sums of four activations, added in order.
inline F quad_sums(const float* x, const Pattern& pattern) {
  F sum = mul(set1(x[0]), load(pattern.v[0]));
  for (int k = 1; k < 4; ++k) sum = add(sum, mul(set1(x[k]), load(pattern.v[k])));
  return sum;
}

// Every sum is in [-508, 508]: 256 * high + low with low in [-128, 127], which a quarter added to the whole decides.
void build_exact(const QBlock& q, int32_t zero, uint8_t* tables, LutFactors* factors) {
  float x[kBlock];
  for (int i = 0; i < kBlock; ++i) x[i] = static_cast<float>(q.q[i]);
  for (int quad = 0; quad < kQuads; ++quad) {
    const F sums = quad_sums(x + 4 * quad, kZeroOne);
    const I high = to_int(mul(add(sums, set1(0.25f)), set1(1.0f / 256)));
    int8_t* to = reinterpret_cast<int8_t*>(tables) + 16 * quad;
    store_i8(to, to_int(sub(sums, mul(to_float(high), set1(256.0f)))));
    store_i8(to + kTableBytes, high);
  }
  *factors = {q.scale, 0.0f, q.shift, zero * q.sum};
}

// A code is the sum of 2^b (1 + sign of bit b) / 2, so with signs the sum of entries counts half, and 7.5 is left of each code.
void build_rounded(const float* x, float limit, int32_t zero, uint8_t* tables, LutFactors* factors) {
  F sums[kQuads], most = set1(0.0f);
  for (int quad = 0; quad < kQuads; ++quad) {
    sums[quad] = quad_sums(x + 4 * quad, kSigns);
    most = max(most, abs(sums[quad]));
  }
  const float largest = reduce_max(most);
  const F inverse = set1(largest > 0 ? limit / largest : 0.0f);
  for (int quad = 0; quad < kQuads; ++quad)
    store_i8(reinterpret_cast<int8_t*>(tables) + 16 * quad, to_int(mul(sums[quad], inverse)));
  const float total = reduce_add(add(load(x), load(x + 16)));
  *factors = {0.5f * (largest / limit), (7.5f - static_cast<float>(zero)) * total, total, 0};
}

void build(Sums kind, const float* x, const QBlock* q, int64_t blocks, int32_t zero, const LutRow& to) {
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t* tables = to.tables + b * table_stride(kind);
    if (kind == Sums::kExact)
      build_exact(q[b], zero, tables, to.factors + b);
    else
      build_rounded(x + b * kBlock, kind == Sums::kInt8 ? 127.0f : 31.0f, zero, tables, to.factors + b);
  }
}

// As `multiply` of dot.inl: acc = fma(fl(dw * scale), sum, acc), for rounded tables acc = fma(dw, centre, acc), and for
// mins acc = fma(m, shift, acc), block after block.
template <Sums KIND, bool MINS, int NT, int SLICES>
__attribute__((flatten)) void dot_slices(const Matrix& w, const uint8_t* p, int first, const LutRow* rows, float* y) {
  constexpr int kScaleBytes = MINS ? 64 : 32, kCodeBytes = kRows * kBlock / 2;
  constexpr int kLines = kCodeBytes / 64 + 1;        // of a block and its scales
  constexpr int kParts = kRows / (kSlice * SLICES);  // calls that share a group
  S acc[SLICES][NT];
  each<SLICES>([&](auto s) SPECSPARSE_EACH { each<NT>([&](auto t) SPECSPARSE_EACH { acc[s][t] = slice_zero(); }); });
  // This call's part of the next group is fetched meanwhile.
  const int64_t ahead = w.group_bytes + 64 * (first / (kSlice * SLICES)), blocks = w.cols / kBlock;
  for (int64_t b = 0; b < blocks; ++b) {
    S d[SLICES], m[SLICES];
    each<SLICES>([&](auto s) SPECSPARSE_EACH {
      d[s] = slice_f16(p + 2 * (first + kSlice * s));
      if (MINS) m[s] = slice_f16(p + 32 + 2 * (first + kSlice * s));
    });
    p += kScaleBytes;
    each<(kLines + kParts - 1) / kParts>([&](auto line) SPECSPARSE_EACH { __builtin_prefetch(p + ahead + 64 * kParts * line); });
    const uint8_t* tables[NT];
    each<NT>([&](auto t) SPECSPARSE_EACH { tables[t] = rows[t].tables + b * table_stride(KIND); });
    SI dot[SLICES][NT];
    look_up<KIND, NT, SLICES>(p + 4 * first, tables, dot);
    p += kCodeBytes;
    each<NT>([&](auto t) SPECSPARSE_EACH {
      const LutFactors& f = rows[t].factors[b];
      if (KIND == Sums::kExact && w.zero)
        each<SLICES>([&](auto s) SPECSPARSE_EACH { dot[s][t] = slice_minus(dot[s][t], f.less); });
      const S scale = slice_set1(f.scale), centre = slice_set1(f.centre), shift = slice_set1(f.shift);
      each<SLICES>([&](auto s) SPECSPARSE_EACH {
        acc[s][t] = fma(mul(d[s], scale), to_float(dot[s][t]), acc[s][t]);
        if (KIND != Sums::kExact) acc[s][t] = fma(d[s], centre, acc[s][t]);
        if (MINS) acc[s][t] = fma(m[s], shift, acc[s][t]);
      });
    });
  }
  each<NT>([&](auto t) SPECSPARSE_EACH { each<SLICES>([&](auto s) SPECSPARSE_EACH { store(y + 16 * t + first + kSlice * s, acc[s][t]); }); });
}

template <Sums KIND, bool MINS, int NT>
void dot_group(const Matrix& w, int64_t g, const LutRow* rows, float* y) {
  // Slices in registers: all of one row of activations, of two where words alone are added up and not bytes as well.
  constexpr int kAtOnce = NT <= (KIND == Sums::kInt8 ? 2 : 1) ? kRows / kSlice : 1;
  for (int first = 0; first < kRows; first += kSlice * kAtOnce)
    dot_slices<KIND, MINS, NT, kAtOnce>(w, w.data + g * w.group_bytes, first, rows, y);
}

template <Sums KIND, bool MINS>
void dot_tokens(const Matrix& w, int64_t g, const LutRow* rows, int tokens, float* y) {
  switch (tokens) {
    case 1: return dot_group<KIND, MINS, 1>(w, g, rows, y);
    case 2: return dot_group<KIND, MINS, 2>(w, g, rows, y);
    case 3: return dot_group<KIND, MINS, 3>(w, g, rows, y);
    default: return dot_group<KIND, MINS, 4>(w, g, rows, y);
  }
}

template <Sums KIND>
void dot_kind(const Matrix& w, int64_t g, const LutRow* rows, int tokens, float* y) {
  if (w.scales == Scales::kDm) return dot_tokens<KIND, true>(w, g, rows, tokens, y);
  dot_tokens<KIND, false>(w, g, rows, tokens, y);
}

void dot(Sums kind, const Matrix& w, int64_t g, const LutRow* rows, int tokens, float* y) {
  switch (kind) {
    case Sums::kExact: return dot_kind<Sums::kExact>(w, g, rows, tokens, y);
    case Sums::kInt8: return dot_kind<Sums::kInt8>(w, g, rows, tokens, y);
    case Sums::kInt6: return dot_kind<Sums::kInt6>(w, g, rows, tokens, y);
  }
}

}  // namespace

#define SPECSPARSE_LUT_TABLE {build, dot}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
