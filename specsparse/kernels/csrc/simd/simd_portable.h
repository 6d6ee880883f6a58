// Sixteen-lane vectors in plain C++: the definition that the other instruction sets reproduce bit for bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "simd/ops.h"
#include "simd/unroll.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {

// Compiled once and called, not copied into each kernel: sixteen lanes without vector instructions are hundreds of
// instructions, and half of the build's time went into their copies.
#define SPECSPARSE_SHARED inline __attribute__((noinline))
#if defined(__FP_FAST_FMAF)
#define SPECSPARSE_FMA inline
#else
#define SPECSPARSE_FMA SPECSPARSE_SHARED  // each lane is a call of the library
#endif

// Sums of attention that the registers hold, and queries of a group.
constexpr int kScoreSums = 1, kValueSums = 1, kGroup = 4;
constexpr bool kSlowHalves = true;  // to widen
constexpr int kMaxFloatTokens = 4;
using RowsAtOnce = std::integer_sequence<int, 1, 4>;  // of a product of integers

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};

#define LANES(expr)                       \
  for (int i = 0; i < 16; ++i) r.v[i] = (expr); \
  return r

inline F zero() { return F{}; }
inline F set1(float x) { F r; LANES(x); }
inline F load(const float* p) { F r; LANES(p[i]); }
inline void store(float* p, const F& a) { std::memcpy(p, a.v, sizeof a.v); }
inline F add(const F& a, const F& b) { F r; LANES(a.v[i] + b.v[i]); }
inline F sub(const F& a, const F& b) { F r; LANES(a.v[i] - b.v[i]); }
inline F mul(const F& a, const F& b) { F r; LANES(a.v[i] * b.v[i]); }
inline F div(const F& a, const F& b) { F r; LANES(a.v[i] / b.v[i]); }
SPECSPARSE_FMA F fma(const F& a, const F& b, const F& c) { F r; LANES(std::fma(a.v[i], b.v[i], c.v[i])); }
// x86 semantics: the second operand where either is NaN.
inline F max(const F& a, const F& b) { F r; LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F abs(const F& a) { F r; LANES(std::fabs(a.v[i])); }
inline F to_float(const I& a) { F r; LANES(static_cast<float>(a.v[i])); }
inline I zero_i() { return I{}; }
inline I set1_i(int32_t x) { I r; LANES(x); }
inline I add(const I& a, const I& b) { I r; LANES(a.v[i] + b.v[i]); }
// Round to nearest even; what does not fit an int32 becomes its minimum, as on x86.
SPECSPARSE_SHARED I to_int(const F& a) {
  I r;
  LANES(std::fabs(a.v[i]) < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(a.v[i])) : INT32_MIN);
}
// 2^n for n in [-126, 127].
inline F exp2_int(const I& n) {
  F r;
  for (int i = 0; i < 16; ++i) {
    const int32_t bits = static_cast<int32_t>(static_cast<uint32_t>(n.v[i] + 127) << 23);
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline F where_less(const F& a, const F& b, const F& x, const F& y) { F r; LANES(a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }
inline void store_i8(int8_t* p, const I& a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i]);
}
inline int32_t sum16(const int8_t* p) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += p[i];
  return sum;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, mantissa = h & 0x3ffu;
  const int exponent = (h >> 10) & 31;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0);
  } else if (exponent) {
    bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  } else {
    float x = std::ldexp(static_cast<float>(mantissa), -24);
    std::memcpy(&bits, &x, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00 | ((bits >> 13) & 0x3ff);
  if (bits >= 0x47800000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // subnormal half: units of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  }
  const uint32_t rounded = bits + 0xfff + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
}
SPECSPARSE_SHARED F load_f16(const void* p) {
  uint16_t h[16];
  std::memcpy(h, p, sizeof h);
  F r;
  LANES(half_to_float(h[i]));
}
SPECSPARSE_SHARED void store_f16(void* p, const F& a) {
  uint16_t h[16];
  for (int i = 0; i < 16; ++i) h[i] = float_to_half(a.v[i]);
  std::memcpy(p, h, sizeof h);
}
inline float half_at(const void* p) {
  uint16_t h;
  __builtin_memcpy(&h, p, 2);
  return half_to_float(h);
}
inline F load_bf16(const void* p) {
  uint16_t h[16];
  std::memcpy(h, p, sizeof h);
  F r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = static_cast<uint32_t>(h[i]) << 16;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline F load_i8(const void* p) {
  const int8_t* b = static_cast<const int8_t*>(p);
  F r;
  LANES(static_cast<float>(b[i]));
}
inline F load_u8(const void* p) {
  const uint8_t* b = static_cast<const uint8_t*>(p);
  F r;
  LANES(static_cast<float>(b[i]));
}
#undef LANES

// Sums lanes in a fixed tree: i with i + 8, then + 4, + 2, + 1.
SPECSPARSE_SHARED float reduce_add(const F& a) {
  float t[8];
  for (int i = 0; i < 8; ++i) t[i] = a.v[i] + a.v[i + 8];
  for (int step = 4; step; step /= 2)
    for (int i = 0; i < step; ++i) t[i] += t[i + step];
  return t[0];
}
SPECSPARSE_SHARED float reduce_max(const F& a) {
  float m = a.v[0];
  for (int i = 1; i < 16; ++i) m = m > a.v[i] ? m : a.v[i];
  return m;
}
// NaN if there is one, as no maximum of floats says.
SPECSPARSE_SHARED float largest_magnitude(const F& a, const F& b) {
  float m = 0;
  for (int i = 0; i < 16; ++i)
    for (const float x : {std::fabs(a.v[i]), std::fabs(b.v[i])}) m = m != m || m > x ? m : x;
  return m;
}

#include "simd/whole_slices.inl"

// Integer dot products of one block of 16 rows x 32 columns with NT blocks of activations. dot[t] is exact. It is summed in
// arrays of the function's own: bytes may alias what a pointer leads to.
template <int NT, class Value>
inline void dot_nibbles(const uint8_t* w, const QBlock* x, SI* dot, Value value) {
  SI sum[NT] = {};
  for (int c = 0; c < 4; ++c)
    for (int r = 0; r < 16; ++r)
      for (int b = 0; b < 4; ++b) {
        const uint8_t code = w[64 * c + 4 * r + b];
        const int low = value(code & 15), high = value(code >> 4);
        for (int t = 0; t < NT; ++t) sum[t].v[r] += low * x[t].q[4 * c + b] + high * x[t].q[16 + 4 * c + b];
      }
  for (int t = 0; t < NT; ++t) dot[t] = sum[t];
}

// Codes that count from `zero`.
template <int NT, int WIDE>
SPECSPARSE_SHARED void dot_codes(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], int32_t zero) {
  dot_nibbles<NT>(*w, x, *dot, [zero](int code) { return code - zero; });
}

// Codes that stand for the 16 signed values of a table.
template <int NT, int WIDE>
SPECSPARSE_SHARED void dot_table(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT], const int8_t* lut) {
  dot_nibbles<NT>(*w, x, *dot, [lut](int code) { return lut[code]; });
}

// int8 codes of `CHUNKS` chunks of four columns from chunk FIRST on: the block or half of it.
template <int NT, int WIDE, int CHUNKS, int FIRST>
SPECSPARSE_SHARED void dot_int8(const uint8_t* const* w, const QBlock* x, SI (*dot)[NT]) {
  SI sum[NT] = {};
  for (int c = FIRST; c < FIRST + CHUNKS; ++c)
    for (int r = 0; r < 16; ++r)
      for (int b = 0; b < 4; ++b)
        for (int t = 0; t < NT; ++t) sum[t].v[r] += static_cast<int8_t>((*w)[64 * c + 4 * r + b]) * x[t].q[4 * c + b];
  for (int t = 0; t < NT; ++t) (*dot)[t] = sum[t];
}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
