// What several kernels do to single vectors and blocks.
#pragma once

#include "simd/ops.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

// exp of x <= 88 to 1 ulp or so: 2^n * p(r), Cody-Waite reduction, degree-6 polynomial. 0 below -87, whatever came out.
inline F exp_below_88(F x) {
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
  return where_less(x, set1(-87.0f), zero(), mul(p, exp2_int(n)));
}

inline F exp16(F x) {
  const F high = set1(88.0f);
  return exp_below_88(where_less(high, x, high, x));
}

// One block of 32: scale = max|x| / 127, codes rounded to nearest even.
void quantise_block(const float* x, QBlock* out) {
  const F a = load(x), b = load(x + 16);
  const float largest = largest_magnitude(a, b);  // NaN if there is one: its codes would hide it, its scale does not
  const F inverse = set1(largest > 0 ? 127.0f / largest : 0.0f);
  store_i8(out->q, to_int(mul(a, inverse)));
  store_i8(out->q + 16, to_int(mul(b, inverse)));
  out->scale = largest / 127.0f;
  for (int half = 0; half < 2; ++half) {
    const int32_t sum = sum16(out->q + 16 * half);
    out->shifts[half] = out->scale * static_cast<float>(sum);
    out->less[1 + half] = -128 * sum;
    out->sum = half ? out->sum + sum : sum;
  }
  out->less[0] = -128 * out->sum;
  out->shift = out->scale * static_cast<float>(out->sum);
}

#if !defined(SPECSPARSE_QUANTISES_ROWS)
// Block i of x goes to out[i * stride].
void quantise_row(const float* x, int64_t blocks, QBlock* out, int64_t stride) {
  for (int64_t b = 0; b < blocks; ++b) quantise_block(x + b * kBlock, out + b * stride);
}
#endif

}  // namespace
}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
