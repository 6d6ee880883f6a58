// The kernels, written once over the sixteen-lane vectors of the simd_*.h that was included before.
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "dense/dot.inl"
#include "simd/kinds.h"
#include "simd/ops.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

// exp on [-87.3, 88.7] to 1 ulp or so: 2^n * p(r), Cody-Waite reduction, degree-6 polynomial. 0 below -87.
inline F exp16(F x) {
  const F low = set1(-87.0f), high = set1(88.0f);
  const F flushed = x;
  x = where_less(high, x, high, x);
  x = where_less(x, low, low, x);
  const I n = to_int(mul(x, set1(1.44269504f)));
  const F nf = to_float(n);
  F r = fma(nf, set1(-0.693359375f), x);
  r = fma(nf, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return where_less(flushed, low, zero(), mul(p, exp2_int(n)));
}

float sum_of_squares(const float* x, int64_t n) {
  F acc = zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F v = load(x + i);
    acc = fma(v, v, acc);
  }
  if (i < n) {
    float rest[16] = {};
    std::memcpy(rest, x + i, (n - i) * sizeof(float));
    const F v = load(rest);
    acc = fma(v, v, acc);
  }
  return reduce_add(acc);
}

void normalise(const float* from, const float* norm, float eps, int64_t n, float* to) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(from, n) / static_cast<float>(n) + eps);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(to + i, mul(mul(load(from + i), set1(scale)), load(norm + i)));
  for (; i < n; ++i) to[i] = (from[i] * scale) * norm[i];
}

// One block of 32: scale = max|x| / 127, codes rounded to nearest even.
void quantise_block(const float* x, QBlock* out) {
  const F a = load(x), b = load(x + 16);
  const float largest = reduce_max(max(abs(a), abs(b)));
  const F inverse = set1(largest > 0 ? 127.0f / largest : 0.0f);
  store_i8(out->q, to_int(mul(a, inverse)));
  store_i8(out->q + 16, to_int(mul(b, inverse)));
  out->scale = largest / 127.0f;
  for (int half = 0; half < 2; ++half) {
    out->sums[half] = sum16(out->q + 16 * half);
    out->shifts[half] = out->scale * static_cast<float>(out->sums[half]);
  }
  out->sum = out->sums[0] + out->sums[1];
  out->shift = out->scale * static_cast<float>(out->sum);
}

void prepare(const float* from, const float* norm, float eps, const Activations& out, int64_t to, bool quantise) {
  float* x = out.x + to * out.cols;
  if (norm) {
    normalise(from, norm, eps, out.cols, x);
  } else {
    std::memcpy(x, from, out.cols * sizeof(float));
  }
  if (!quantise) return;
  for (int64_t b = 0; b < out.blocks; ++b) quantise_block(x + b * kBlock, out.q + to * out.blocks + b);
}

template <int NT, class Read>
__attribute__((flatten)) void dot_floats(const Matrix& w, const uint8_t* group, int64_t step, const Activations& x, int64_t row, float* y, Read read) {
  F acc[NT];
  each<NT>([&](auto t) SPECSPARSE_EACH { acc[t] = zero(); });
  const float* xs = x.x + row * x.cols;
  for (int64_t k = 0; k < w.cols; ++k) {
    __builtin_prefetch(group + k * step + 2048);
    const F v = read(group + k * step);
    each<NT>([&](auto t) SPECSPARSE_EACH { acc[t] = fma(v, set1(xs[t * x.cols + k]), acc[t]); });
  }
  each<NT>([&](auto t) SPECSPARSE_EACH { store(y + 16 * t, acc[t]); });
}

template <int NT>
void dot_float_type(const Matrix& w, const uint8_t* group, const Activations& x, int64_t row, float* y) {
  if (w.codes == Codes::kF16)
    return dot_floats<NT>(w, group, 32, x, row, y, [](const uint8_t* p) { return load_f16(p); });
  if (w.codes == Codes::kBf16)
    return dot_floats<NT>(w, group, 32, x, row, y, [](const uint8_t* p) { return load_bf16(p); });
  dot_floats<NT>(w, group, 64, x, row, y, [](const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); });
}

template <int... T>
constexpr std::array<DotTokens, sizeof...(T)> float_dots(std::integer_sequence<int, T...>) {
  return {dot_float_type<T + 1>...};
}

void dot(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  static constexpr auto kFloats = float_dots(std::make_integer_sequence<int, kMaxFloatTokens>());
  const uint8_t* group = w.data + g * w.group_bytes;
  if (w.scales == Scales::kNone) return in_tiles(kFloats, w, group, x, row, tokens, y);
  dot_blocked(w, group, x, row, tokens, y);
}

void glu(float* gate, const float* up, int64_t count, Act act) {
  for (int64_t i = 0; i < count; i += 16) {
    const F g = load(gate + i), u = load(up + i);
    F a;
    if (act == Act::kSilu) {
      a = div(g, add(set1(1.0f), exp16(sub(zero(), g))));
    } else if (act == Act::kGeluTanh) {  // g / 2 * (1 + tanh(z)) = g / (1 + exp(-2 z)), z = sqrt(2 / pi) (g + 0.044715 g^3)
      const F minus_2z = mul(g, fma(mul(g, g), set1(-0.0713548162726f), set1(-1.59576912161f)));
      a = div(g, add(set1(1.0f), exp16(minus_2z)));
    } else {
      a = max(g, zero());
      if (act == Act::kRelu2) a = mul(a, a);
    }
    store(gate + i, mul(a, u));
  }
}

template <KvType TYPE>
F load_kv(const void* base, int64_t index) {
  if constexpr (TYPE == KvType::kF32) return load(static_cast<const float*>(base) + index);
  const void* p = static_cast<const uint16_t*>(base) + index;
  return TYPE == KvType::kF16 ? load_f16(p) : load_bf16(p);
}

// Scores of `BLOCKS` key blocks: lane = slot, each a chain over d.
template <KvType TYPE, int NQ, int BLOCKS>
__attribute__((flatten)) void score_blocks(const AttendTile& t, int64_t block, float* scores, int64_t stride) {
  F acc[BLOCKS][NQ];
  const float* q[NQ];
  each<NQ>([&](auto j) SPECSPARSE_EACH { q[j] = t.q[j]; });
  each<BLOCKS>([&](auto b) SPECSPARSE_EACH { each<NQ>([&](auto j) SPECSPARSE_EACH { acc[b][j] = zero(); }); });
  for (int64_t i = 0; i < t.d; ++i)
    each<BLOCKS>([&](auto b) SPECSPARSE_EACH {
      const F k = load_kv<TYPE>(t.k, ((block + b) * t.d + i) * 16);
      each<NQ>([&](auto j) SPECSPARSE_EACH { acc[b][j] = fma(k, set1(q[j][i]), acc[b][j]); });
    });
  each<BLOCKS>([&](auto b) SPECSPARSE_EACH { each<NQ>([&](auto j) SPECSPARSE_EACH { store(scores + j * stride + (block + b) * 16, acc[b][j]); }); });
}

// Not std::max: a copy of it compiled for one instruction set could be linked into the code of another.
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Adds p[i] * v[slot] for 16 columns at `column`, positions in order.
template <KvType TYPE, int NQ>
__attribute__((flatten)) void weigh_values(const AttendTile& t, const float* p, int64_t stride, int64_t column, const float* inverse) {
  F acc[NQ];
  each<NQ>([&](auto j) SPECSPARSE_EACH { acc[j] = zero(); });
  int64_t common = 0;  // from here on every query sees what is shared
  each<NQ>([&](auto j) SPECSPARSE_EACH { common = larger(common, t.first[j] < t.shared ? t.first[j] : t.shared); });
  each<NQ>([&](auto j) SPECSPARSE_EACH {
    for (int64_t i = t.first[j]; i < common; ++i)
      acc[j] = fma(load_kv<TYPE>(t.v, i * t.d + column), set1(p[j * stride + i]), acc[j]);
  });
  for (int64_t i = common; i < t.shared; ++i) {
    const F v = load_kv<TYPE>(t.v, i * t.d + column);
    each<NQ>([&](auto j) SPECSPARSE_EACH { acc[j] = fma(v, set1(p[j * stride + i]), acc[j]); });
  }
  each<NQ>([&](auto j) SPECSPARSE_EACH {
    for (int64_t i = larger(t.first[j] - t.shared, 0); i < t.tails[j]; ++i) {
      const F v = load_kv<TYPE>(t.v, t.tail[j][i] * t.d + column);
      acc[j] = fma(v, set1(p[j * stride + t.shared + i]), acc[j]);
    }
    store(t.out[j] + column, mul(acc[j], set1(inverse[j])));
  });
}

template <KvType TYPE, int NQ>
void attend_tile(const AttendTile& t, float* scores) {
  int64_t last = t.shared;
  for (int j = 0; j < NQ; ++j)
    if (t.tails[j] && t.tail[j][t.tails[j] - 1] + 1 > last) last = t.tail[j][t.tails[j] - 1] + 1;
  const int64_t blocks = (last + 15) / 16, stride = blocks * 16 + 16;
  int64_t block = t.first[0] / 16;
  for (int j = 1; j < NQ; ++j)
    if (t.first[j] / 16 < block) block = t.first[j] / 16;
  if (NQ <= 2)
    for (; block + 2 <= blocks; block += 2) score_blocks<TYPE, NQ, 2>(t, block, scores, stride);
  for (; block < blocks; ++block) score_blocks<TYPE, NQ, 1>(t, block, scores, stride);
  float inverse[NQ];
  for (int j = 0; j < NQ; ++j) {
    float* s = scores + j * stride;
    // A path is ascending, so its scores move down without overwriting one that is still to be read.
    const int64_t first = t.first[j], start = first / 16 * 16;
    for (int64_t i = larger(first - t.shared, 0); i < t.tails[j]; ++i) s[t.shared + i] = s[t.tail[j][i]];
    const int64_t seen = t.shared + t.tails[j], padded = (seen + 15) / 16 * 16;
    for (int64_t i = start; i < first; ++i) s[i] = -INFINITY;
    for (int64_t i = seen; i < padded; ++i) s[i] = -INFINITY;
    F top = load(s + start);
    for (int64_t i = start + 16; i < padded; i += 16) top = max(top, load(s + i));
    const F largest = set1(reduce_max(top));
    F sum = zero();
    for (int64_t i = start; i < padded; i += 16) {
      const F e = exp16(sub(load(s + i), largest));
      sum = add(sum, e);
      store(s + i, e);
    }
    inverse[j] = 1.0f / reduce_add(sum);
  }
  for (int64_t column = 0; column < t.d; column += 16) weigh_values<TYPE, NQ>(t, scores, stride, column, inverse);
}

template <KvType TYPE>
void attend_typed(const AttendTile& t, float* scratch) {
  switch (t.queries) {
    case 1: return attend_tile<TYPE, 1>(t, scratch);
    case 2: return attend_tile<TYPE, 2>(t, scratch);
    case 3: return attend_tile<TYPE, 3>(t, scratch);
    default: return attend_tile<TYPE, 4>(t, scratch);
  }
}

void attend(const AttendTile& t, float* scratch) {
  if (t.type == KvType::kF32) return attend_typed<KvType::kF32>(t, scratch);
  if (t.type == KvType::kF16) return attend_typed<KvType::kF16>(t, scratch);
  attend_typed<KvType::kBf16>(t, scratch);
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void store_kv(const float* k, const float* v, int64_t d, int64_t slot, KvType type, void* cache_k, void* cache_v) {
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

void exp_shifted(const float* x, int64_t count, float top, float temperature, float* out) {
  const F t = set1(temperature), largest = set1(top);
  for (int64_t i = 0; i < count; i += 16) store(out + i, exp16(div(sub(load(x + i), largest), t)));
}

void block_sums(const float* x, int64_t count, float* sums) {
  for (int64_t i = 0; i < count; i += 256) {
    F v[16];
    for (int j = 0; j < 8; ++j) v[j] = add(load(x + i + 16 * j), load(x + i + 16 * (j + 8)));
    for (int width = 4; width; width /= 2)
      for (int j = 0; j < width; ++j) v[j] = add(v[j], v[j + width]);
    sums[i / 256] = reduce_add(v[0]);
  }
}

void block_maxima(const float* x, int64_t count, float* maxima) {
  for (int64_t i = 0; i < count; i += 64)
    maxima[i / 64] = reduce_max(max(max(load(x + i), load(x + i + 16)), max(load(x + i + 32), load(x + i + 48))));
}

float peak(const float* x, int64_t count, bool* wild) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr int kWide = 4;  // vectors side by side, or every maximum would wait for the one before it
  F top[kWide], odd[kWide];
  each<kWide>([&](auto j) SPECSPARSE_EACH { top[j] = set1(-kInfinity), odd[j] = zero(); });
  const F infinity = set1(kInfinity), one = set1(1.0f);
  int64_t i = 0;
  for (; i + kWide * 16 <= count; i += kWide * 16)
    each<kWide>([&](auto j) SPECSPARSE_EACH {
      const F v = load(x + i + j * 16);
      top[j] = max(v, top[j]);  // the second where the first is NaN
      odd[j] = max(odd[j], where_less(v, infinity, zero(), one));
    });
  float best = reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));
  bool found = reduce_max(max(max(odd[0], odd[1]), max(odd[2], odd[3]))) > 0.0f;
  for (; i < count; ++i) best = x[i] > best ? x[i] : best, found |= !(x[i] < kInfinity);
  *wild = found;
  return best;
}

}  // namespace

#define SPECSPARSE_TABLE(NAME, REGISTERS) \
  {NAME, REGISTERS, kTile, prepare, dot, glu, attend, store_kv, exp_shifted, block_sums, block_maxima, peak, nullptr}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
