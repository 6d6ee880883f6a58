// The kernels, written once over the sixteen-lane vectors of the simd_*.h that was included before.
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "dense/attend.inl"
#include "dense/dot.inl"
#include "dense/elements.inl"
#include "simd/kinds.h"
#include "simd/ops.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

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

void prepare(const float* from, const float* norm, float eps, const Activations& out, int64_t to, bool quantise) {
  float* x = out.x + to * out.cols;
  if (norm) {
    normalise(from, norm, eps, out.cols, x);
  } else {
    std::memcpy(x, from, out.cols * sizeof(float));
  }
  if (!quantise) return;
  quantise_row(x, out.blocks, out.at(to, 0), out.tile);
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

// Rows in parts of even size: six as 3 + 3 cost less than as 4 + 2.
template <int... T>
void dot_floats(std::integer_sequence<int, T...>, const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  constexpr decltype(&dot_float_type<1>) kCalls[] = {dot_float_type<T + 1>...};
  constexpr int kMost = sizeof...(T);
  for (int done = 0, left = (tokens + kMost - 1) / kMost; left; --left) {
    const int now = (tokens - done + left - 1) / left;
    kCalls[now - 1](w, w.data + g * w.group_bytes, x, row + done, y + kRows * done);
    done += now;
  }
}

void dot(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  if (!dot_blocked<1>(RowsAtOnce(), w, g, 1, x, row, tokens, y))
    dot_floats(std::make_integer_sequence<int, kMaxFloatTokens>(), w, g, x, row, tokens, y);
}

void glu(float* gate, const float* up, int64_t count, Act act) {
  for (int64_t i = 0; i < count; i += 16) {
    F g = load(gate + i), u = load(up + i), a;
    if (act == Act::kSilu) {
      a = div(g, add(set1(1.0f), exp16(sub(zero(), g))));
    } else if (act == Act::kGeluTanh) {  // g / 2 * (1 + tanh(z)) = g / (1 + exp(-2 z)), z = sqrt(2 / pi) (g + 0.044715 g^3)
      const F minus_2z = mul(g, fma(mul(g, g), set1(-0.0713548162726f), set1(-1.59576912161f)));
      a = div(g, add(set1(1.0f), exp16(minus_2z)));
    } else if (act == Act::kClampedSwiglu) {  // g sigmoid(1.702 g) (u + 1), both held within 7, g from above alone
      const F limit = set1(7.0f), least = set1(-7.0f);
      g = where_less(limit, g, limit, g), u = where_less(limit, u, limit, u);
      a = div(g, add(set1(1.0f), exp16(mul(set1(-1.702f), g))));
      u = add(where_less(u, least, least, u), set1(1.0f));
    } else {
      a = where_less(g, zero(), zero(), g);  // a NaN stays one
      if (act == Act::kRelu2) a = mul(a, a);
    }
    store(gate + i, mul(a, u));
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

#define SPECSPARSE_TABLE(NAME, REGISTERS, GROUPS) \
  {NAME,     REGISTERS,   kGroupTile, prepare,      dot,  glu,     score, soften, weigh, \
   store_kv, exp_shifted, block_sums, block_maxima, peak, nullptr, GROUPS}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
