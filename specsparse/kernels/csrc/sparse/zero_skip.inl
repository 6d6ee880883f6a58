// An FFN with zeros, the kernels: what the dense kernels give, bit for bit, from the neurons that are not zero.
//
// A block of 32 is an exact whole number there before its scales are applied, acc = fma(fl(dw * dx), whole number, acc), block
// after block. What is zero adds nothing to the whole number, and a block of zeros adds 0 to acc.

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

// out[i] = row js[i] of Q4_0 times x, i < count <= 16; out has room for sixteen.
void dot_neurons(const NeuronRows& w, const int32_t* js, int count, const QBlock* x, float* out, float* scratch) {
  static const QBlock kZeros{};
  const int64_t blocks = w.cols / kBlock, scales = w.chunks() * w.code_bytes();
  const uint8_t* rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = w.row(js[std::min(i, count - 1)]);
  for (int64_t b = 0; b < blocks; b += 16) turn_halves(rows, scales + 2 * b, scratch + 16 * b);
  F acc = zero();
  for (int64_t b = 0; b < blocks; b += 2) {
    const QBlock &even = x[b], &odd = b + 1 < blocks ? x[b + 1] : kZeros;
    I one, two;
    chunk_sums(rows, b / 2 * w.code_bytes(), even.q, odd.q, (count + 3) / 4, &one, &two);
    acc = fma(mul(load(scratch + 16 * b), set1(even.scale)), to_float(add(one, set1_i(-kNibbleZero * even.sum))), acc);
    if (b + 1 < blocks)
      acc = fma(mul(load(scratch + 16 * b + 16), set1(odd.scale)), to_float(add(two, set1_i(-kNibbleZero * odd.sum))), acc);
  }
  store(out, acc);
}

// A block's whole numbers are at most 32 * 127 * 8 and fit 16 bits.
template <int PARTS>
__attribute__((flatten)) void project_parts(const uint8_t* scales, int64_t blocks, const QBlock* x, float* y) {
  const uint8_t* p = scales + blocks * kStripeScales;
  constexpr int64_t kAhead = 4;  // blocks: single lines come late
  for (int64_t b = 0; b < blocks; ++b, p += kStripeCodes, scales += kStripeScales) {
    if (b + kAhead < blocks)
      for (uint32_t left = nonzero_bytes(x[b + kAhead].q); left; left &= left - 1)
        __builtin_prefetch(p + kAhead * kStripeCodes + 64 * __builtin_ctz(left));
    uint32_t left = nonzero_bytes(x[b].q);
    if (!left) continue;
    Shorts sums[PARTS];
    each<PARTS>([&](auto k) SPECSPARSE_EACH { sums[k] = zero_shorts(); });
    for (; left; left &= left - 1) {
      const int j = __builtin_ctz(left);
      add_multiples<PARTS>(p + 64 * j, multiples(x[b].q[j]), sums);
    }
    const F scale = set1(x[b].scale);
    each<2 * PARTS>([&](auto i) SPECSPARSE_EACH {
      const I whole = i % 2 ? high_half(sums[i / 2]) : low_half(sums[i / 2]);
      store(y + 16 * i, fma(mul(load_f16(scales + 32 * i), scale), to_float(whole), load(y + 16 * i)));
    });
  }
}

// y[c] += down's output c of the stripe that begins at p, c < 32 * parts, 1 <= parts <= 4.
void project_stripe(const uint8_t* p, int64_t blocks, int parts, const QBlock* x, float* y) {
  switch (parts) {
    case 1: return project_parts<1>(p, blocks, x, y);
    case 2: return project_parts<2>(p, blocks, x, y);
    case 3: return project_parts<3>(p, blocks, x, y);
    default: return project_parts<4>(p, blocks, x, y);
  }
}

}  // namespace
}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
