// The kernels, written once over the sixteen-lane vectors of the simd_*.h that was included before.
#include <cmath>
#include <cstring>

#include "ops.h"

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
void quantise_block(const float* x, int8_t* q, float* scale, int32_t* sum) {
  const F a = load(x), b = load(x + 16);
  const float largest = reduce_max(max(abs(a), abs(b)));
  const F inverse = set1(largest > 0 ? 127.0f / largest : 0.0f);
  store_i8(q, to_int(mul(a, inverse)));
  store_i8(q + 16, to_int(mul(b, inverse)));
  *scale = largest / 127.0f;
  for (int half = 0; half < 2; ++half) {
    int32_t s = 0;
    for (int i = 0; i < 16; ++i) s += q[16 * half + i];
    sum[half] = s;
  }
}

void prepare(const float* from, const float* norm, float eps, const Activations& out, int64_t to, bool quantise) {
  float* x = out.x + to * out.cols;
  if (norm) {
    normalise(from, norm, eps, out.cols, x);
  } else {
    std::memcpy(x, from, out.cols * sizeof(float));
  }
  if (!quantise) return;
  for (int64_t b = 0; b < out.blocks; ++b) {
    const int64_t at = to * out.blocks + b;
    quantise_block(x + b * kBlock, out.q + at * kBlock, out.scale + at, out.sum + 2 * at);
  }
}

template <int NT>
void dot_floats(const Matrix& w, const uint8_t* group, const Activations& x, int64_t row, float* y) {
  F acc[NT];
  for (int t = 0; t < NT; ++t) acc[t] = zero();
  const float* xs = x.x + row * x.cols;
  auto over = [&](auto read, int64_t step) {
    for (int64_t k = 0; k < w.cols; ++k) {
      const F v = read(group + k * step);
      for (int t = 0; t < NT; ++t) acc[t] = fma(v, set1(xs[t * x.cols + k]), acc[t]);
    }
  };
  if (w.codes == Codes::kF16) {
    over([](const uint8_t* p) { return load_f16(p); }, 32);
  } else if (w.codes == Codes::kBf16) {
    over([](const uint8_t* p) { return load_bf16(p); }, 32);
  } else {
    over([](const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }, 64);
  }
  for (int t = 0; t < NT; ++t) store(y + 16 * t, acc[t]);
}

// acc = fma(fl(dw * dx), dot, acc), then for mins acc = fma(mw, fl(dx * sum), acc): block after block, sub after sub.
template <Codes CODES, Scales SCALES, int SUBS, int NT>
void dot_blocks(const Matrix& w, const uint8_t* p, const Activations& x, int64_t row, float* y) {
  constexpr bool kMins = SCALES == Scales::kDm || SCALES == Scales::kSuperMin;
  constexpr bool kHeader = SCALES == Scales::kSuper || SCALES == Scales::kSuperMin;
  constexpr int kCodeBytes = kRows * kBlock / (CODES == Codes::kNibble ? 2 : 1);
  const int64_t stride = x.blocks * kBlock;
  F acc[NT];
  for (int t = 0; t < NT; ++t) acc[t] = zero();
  F super_d = zero(), super_m = zero();
  for (int64_t b = 0; b < x.blocks; ++b) {
    if (kHeader && b % (kSuper / kBlock) == 0) {
      super_d = load_f16(p), p += 32;
      if (kMins) super_m = load_f16(p), p += 32;
    }
    F d[SUBS], m[SUBS];
    for (int s = 0; s < SUBS; ++s) {
      if (SCALES == Scales::kF32) d[s] = load(reinterpret_cast<const float*>(p)), p += 64;
      if (SCALES == Scales::kD || SCALES == Scales::kDm) d[s] = load_f16(p), p += 32;
      if (SCALES == Scales::kDm) m[s] = load_f16(p), p += 32;
      if (kHeader) d[s] = mul(super_d, load_i8(p)), p += 16;
    }
    if (SCALES == Scales::kSuperMin)
      for (int s = 0; s < SUBS; ++s) m[s] = sub(zero(), mul(super_m, load_u8(p))), p += 16;
    const int64_t at = row * x.blocks + b;
    const int8_t* q = x.q + at * kBlock;
    I dot[NT][SUBS];
    if constexpr (CODES == Codes::kNibble) {
      dot_nibble<NT, SUBS>(p, q, stride, dot, w.lut);
      if (w.zero)
        for (int t = 0; t < NT; ++t) {
          const int32_t* sum = x.sum + 2 * (at + t * x.blocks);
          dot[t][0] = add(dot[t][0], set1_i(-w.zero * (sum[0] + sum[1])));
        }
    } else {
      dot_int8<NT, SUBS>(p, q, stride, x.sum + 2 * at, 2 * x.blocks, dot);
    }
    p += kCodeBytes;
    for (int t = 0; t < NT; ++t) {
      const float dx = x.scale[at + t * x.blocks];
      const int32_t* sum = x.sum + 2 * (at + t * x.blocks);
      for (int s = 0; s < SUBS; ++s) {
        acc[t] = fma(mul(d[s], set1(dx)), to_float(dot[t][s]), acc[t]);
        if (kMins) acc[t] = fma(m[s], set1(dx * static_cast<float>(SUBS == 1 ? sum[0] + sum[1] : sum[s])), acc[t]);
      }
    }
  }
  for (int t = 0; t < NT; ++t) store(y + 16 * t, acc[t]);
}

template <int NT>
void dot_tokens(const Matrix& w, const uint8_t* group, const Activations& x, int64_t row, float* y) {
  constexpr auto N = Codes::kNibble;
  constexpr auto B = Codes::kInt8;
  if (w.is_float()) return dot_floats<NT>(w, group, x, row, y);
  switch (w.scales) {
    case Scales::kD:
      return w.codes == N ? dot_blocks<N, Scales::kD, 1, NT>(w, group, x, row, y)
                          : dot_blocks<B, Scales::kD, 1, NT>(w, group, x, row, y);
    case Scales::kDm:
      return w.codes == N ? dot_blocks<N, Scales::kDm, 1, NT>(w, group, x, row, y)
                          : dot_blocks<B, Scales::kDm, 1, NT>(w, group, x, row, y);
    case Scales::kF32:
      if (w.codes == N) return dot_blocks<N, Scales::kF32, 1, NT>(w, group, x, row, y);
      return w.sub == 32 ? dot_blocks<B, Scales::kF32, 1, NT>(w, group, x, row, y)
                         : dot_blocks<B, Scales::kF32, 2, NT>(w, group, x, row, y);
    case Scales::kSuper:
      if (w.codes == N) return dot_blocks<N, Scales::kSuper, 1, NT>(w, group, x, row, y);
      return w.sub == 32 ? dot_blocks<B, Scales::kSuper, 1, NT>(w, group, x, row, y)
                         : dot_blocks<B, Scales::kSuper, 2, NT>(w, group, x, row, y);
    case Scales::kSuperMin:
      if (w.codes == N) return dot_blocks<N, Scales::kSuperMin, 1, NT>(w, group, x, row, y);
      return w.sub == 32 ? dot_blocks<B, Scales::kSuperMin, 1, NT>(w, group, x, row, y)
                         : dot_blocks<B, Scales::kSuperMin, 2, NT>(w, group, x, row, y);
    case Scales::kNone:
      return;
  }
}

void dot(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
  const uint8_t* group = w.data + g * w.group_bytes;
  using Fn = void (*)(const Matrix&, const uint8_t*, const Activations&, int64_t, float*);
  static constexpr Fn kByTokens[] = {dot_tokens<1>, dot_tokens<2>, dot_tokens<3>, dot_tokens<4>,
#if SPECSPARSE_TOKENS > 4
                                     dot_tokens<5>, dot_tokens<6>, dot_tokens<7>, dot_tokens<8>,
#endif
  };
  // Tiles of even size: six rows as 3 + 3 cost less than as 4 + 2.
  const int tiles = (tokens + kMaxTokens - 1) / kMaxTokens;
  for (int done = 0, left = tiles; left; --left) {
    const int now = (tokens - done + left - 1) / left;
    kByTokens[now - 1](w, group, x, row + done, y + 16 * done);
    done += now;
  }
}

void glu(float* gate, const float* up, int64_t count, Act act) {
  for (int64_t i = 0; i < count; i += 16) {
    const F g = load(gate + i), u = load(up + i);
    F a;
    if (act == Act::kSilu) {
      a = div(g, add(set1(1.0f), exp16(sub(zero(), g))));
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
void score_blocks(const AttendTile& t, int64_t block, float* scores, int64_t stride) {
  F acc[BLOCKS][NQ];
  for (int b = 0; b < BLOCKS; ++b)
    for (int j = 0; j < NQ; ++j) acc[b][j] = zero();
  for (int64_t i = 0; i < t.d; ++i)
    for (int b = 0; b < BLOCKS; ++b) {
      const F k = load_kv<TYPE>(t.k, ((block + b) * t.d + i) * 16);
      for (int j = 0; j < NQ; ++j) acc[b][j] = fma(k, set1(t.q[j][i]), acc[b][j]);
    }
  for (int b = 0; b < BLOCKS; ++b)
    for (int j = 0; j < NQ; ++j) store(scores + j * stride + (block + b) * 16, acc[b][j]);
}

// Adds p[i] * v[slot] for 16 columns at `column`, positions in order.
template <KvType TYPE, int NQ>
void weigh_values(const AttendTile& t, const float* p, int64_t stride, int64_t column, const float* inverse) {
  F acc[NQ];
  for (int j = 0; j < NQ; ++j) acc[j] = zero();
  for (int64_t i = 0; i < t.shared; ++i) {
    const F v = load_kv<TYPE>(t.v, i * t.d + column);
    for (int j = 0; j < NQ; ++j) acc[j] = fma(v, set1(p[j * stride + i]), acc[j]);
  }
  for (int j = 0; j < NQ; ++j) {
    for (int64_t i = 0; i < t.tails[j]; ++i) {
      const F v = load_kv<TYPE>(t.v, t.tail[j][i] * t.d + column);
      acc[j] = fma(v, set1(p[j * stride + t.shared + i]), acc[j]);
    }
    store(t.out[j] + column, mul(acc[j], set1(inverse[j])));
  }
}

template <KvType TYPE, int NQ>
void attend_tile(const AttendTile& t, float* scores) {
  int64_t last = t.shared;
  for (int j = 0; j < NQ; ++j)
    if (t.tails[j] && t.tail[j][t.tails[j] - 1] + 1 > last) last = t.tail[j][t.tails[j] - 1] + 1;
  const int64_t blocks = (last + 15) / 16, stride = blocks * 16 + 16;
  int64_t block = 0;
  if (NQ <= 2)
    for (; block + 2 <= blocks; block += 2) score_blocks<TYPE, NQ, 2>(t, block, scores, stride);
  for (; block < blocks; ++block) score_blocks<TYPE, NQ, 1>(t, block, scores, stride);
  float inverse[NQ];
  for (int j = 0; j < NQ; ++j) {
    float* s = scores + j * stride;
    // A path is ascending, so its scores move down without overwriting one that is still to be read.
    for (int64_t i = 0; i < t.tails[j]; ++i) s[t.shared + i] = s[t.tail[j][i]];
    const int64_t seen = t.shared + t.tails[j], padded = (seen + 15) / 16 * 16;
    for (int64_t i = seen; i < padded; ++i) s[i] = -INFINITY;
    F top = load(s);
    for (int64_t i = 16; i < padded; i += 16) top = max(top, load(s + i));
    const F largest = set1(reduce_max(top));
    F sum = zero();
    for (int64_t i = 0; i < padded; i += 16) {
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

}  // namespace

#define SPECSPARSE_TABLE(NAME) \
  {NAME, kMaxTokens, prepare, dot, glu, attend, store_kv, exp_shifted, block_sums, block_maxima}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
