// Products with single rows, written once over the vectors that the including file defines.
//
// One neuron times one row of activations: sixteen accumulators for codes, lane i of a chunk of 64 columns taking columns
// 4i .. 4i + 3 as one exact integer sum, acc = fma(fl(dw * dx), sum, acc), chunk after chunk; then for mins, sixteen
// sub-blocks at a time, acc = fma(m, fl(dx * sum of x's codes), acc). Thirty-two accumulators for floats, lane i taking
// columns i, 32 + i, ..; the upper sixteen are added to the lower. Lanes are summed by `reduce_add`.
//
// Rows are fetched into the processor's second cache, as dense/dot.inl says why.
//
// The output: y = fma(fl(a * d), code, y), then for mins y = fma(m, a, y); for floats y = fma(a, w, y); neuron after neuron.
#include <algorithm>
#include <cstring>

#include "simd/kinds.h"
#include "sparse/sparse.h"

namespace specsparse {
inline namespace SPECSPARSE_ISA {
namespace {

// The upper halves of the floats of the sixteen codes.
inline void float_halves(const NeuronRows& w, uint16_t* halves) {
  for (int i = 0; i < 16; ++i) {
    const float value = static_cast<float>(w.lut ? w.lut[i] : i - w.zero);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    halves[i] = static_cast<uint16_t>(bits >> 16);
  }
}

// Sixteen items of a field that has `left` more of them before the row ends at `stop`. Past the field: whatever follows it in
// the row, zeros after its last field.
template <int SIZE, class Load>
inline F load_part(const uint8_t* p, int64_t left, const uint8_t* stop, Load read) {
  if (p + 16 * SIZE <= stop) return read(p);
  alignas(64) uint8_t part[16 * SIZE] = {};
  std::memcpy(part, p, std::min<int64_t>(left, 16) * SIZE);
  return read(part);
}

inline F halves(const uint8_t* p, int64_t left, const uint8_t* stop) {
  return load_part<2>(p, left, stop, [](const uint8_t* q) { return load_f16(q); });
}

// sub-block scales: f16 of super-blocks from `coarse`, times bytes from `fine`, for subs [begin, end).
template <int SUBS, class Load>
inline void super_scales(const uint8_t* coarse, const uint8_t* fine, const uint8_t* stop, int64_t begin, int64_t end, float sign,
                         float* out, Load read) {
  constexpr int kPer = 8 * SUBS;  // subs of a super-block
  for (int64_t i = begin; i < end; i += 16) {
    alignas(64) float d[16];
    const int64_t first = i / kPer, count = std::min<int64_t>((end - i + kPer - 1) / kPer, 16 / kPer);
    store(d, halves(coarse + 2 * first, count, coarse + 2 * (first + count)));  // what follows is no f16
    const F scale = SUBS == 1 ? spread_scales<1>(d) : set1(d[0]);
    store(out + i - begin, mul(mul(set1(sign), scale), load_part<1>(fine + i, end - i, stop, read)));
  }
}

// Scales d and mins m of subs [begin, end) of a row; whole super-blocks. Both arrays have room for 15 more.
// One call a row, so that the kernels need not be compiled for each way to store scales.
template <int SUBS>
__attribute__((noinline)) void expand_scales(const NeuronRows& w, const uint8_t* row, int64_t begin, int64_t end, float* d, float* m) {
  const uint8_t *p = row + w.chunks() * w.code_bytes(), *stop = row + w.row_bytes;
  const int64_t subs = w.subs();
  if (w.scales == Scales::kSuper || w.scales == Scales::kSuperMin) {
    const bool mins = w.scales == Scales::kSuperMin;
    const int64_t header = 2 * (w.cols / kSuper);
    const uint8_t* fine = p + header * (mins ? 2 : 1);
    super_scales<SUBS>(p, fine, stop, begin, end, 1.0f, d, [](const uint8_t* q) { return load_i8(q); });
    if (mins)
      super_scales<SUBS>(p + header, fine + subs, stop, begin, end, -1.0f, m, [](const uint8_t* q) { return load_u8(q); });
    return;
  }
  for (int64_t i = begin; i < end; i += 16) {
    const int64_t left = end - i;
    if (w.scales == Scales::kF32) {
      const auto read = [](const uint8_t* q) { return load(reinterpret_cast<const float*>(q)); };
      store(d + i - begin, load_part<4>(p + 4 * i, left, stop, read));
    } else {
      store(d + i - begin, halves(p + 2 * i, left, stop));
      if (w.scales == Scales::kDm) store(m + i - begin, halves(p + 2 * (subs + i), left, stop));
    }
  }
}

// What the kernels are compiled for, of each kind of blocks: how codes are read, whether there are mins, and sub-blocks.
template <Read READ, bool MINS, int SUBS>
struct RowKind {
  static constexpr Read kRead = READ;
  static constexpr bool kMins = MINS;
  static constexpr int kSubs = SUBS;
};

constexpr bool has_mins(Scales scales) { return scales == Scales::kDm || scales == Scales::kSuperMin; }

// f(RowKind<..>{}) of neurons of blocks; false where they are floats.
template <class F_>
SPECSPARSE_INLINE bool with_row_kind(const NeuronRows& w, F_&& f) {
#define SPECSPARSE_KIND(READ, SCALES, SUBS) \
  static_assert(Read::READ == Read::kInt8 || (SUBS == 1 && (Read::READ == Read::kCodes || !has_mins(Scales::SCALES))), "no kernel");
  SPECSPARSE_KINDS(SPECSPARSE_KIND)
#undef SPECSPARSE_KIND
  if (w.is_float()) return false;
  const bool mins = has_mins(w.scales), halves = w.sub < kBlock;
  if (w.codes == Codes::kNibble) {
    if (w.lut)
      f(RowKind<Read::kTable, false, 1>{});
    else if (mins)
      f(RowKind<Read::kCodes, true, 1>{});
    else
      f(RowKind<Read::kCodes, false, 1>{});
  } else if (halves) {
    mins ? f(RowKind<Read::kInt8, true, 2>{}) : f(RowKind<Read::kInt8, false, 2>{});
  } else {
    mins ? f(RowKind<Read::kInt8, true, 1>{}) : f(RowKind<Read::kInt8, false, 1>{});
  }
  return true;
}

inline int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

// `expand_scales`, and d times x, which is one value or EACH sub-block's own. The commonest kind without a call.
template <bool MINS, int SUBS, bool EACH>
inline void scaled(const NeuronRows& w, const uint8_t* row, int64_t begin, int64_t end, const float* x, float* d, float* m) {
  const F one = set1(x[0]);
  if (!MINS && w.scales == Scales::kD) {
    const uint8_t *p = row + w.chunks() * w.code_bytes() + 2 * begin, *stop = row + w.row_bytes;
    for (int64_t i = 0; i < end - begin; i += 16) store(d + i, mul(EACH ? load(x + i) : one, halves(p + 2 * i, end - begin - i, stop)));
    return;
  }
  expand_scales<SUBS>(w, row, begin, end, d, m);
  for (int64_t i = 0; i < end - begin; i += 16) store(d + i, mul(EACH ? load(x + i) : one, load(d + i)));
}

template <Read READ, bool MINS, int SUBS, int NT>
__attribute__((flatten)) void dot_codes_row(const NeuronRows& w, int64_t j, const uint8_t* next, const Input* const* inputs,
                                            float* out, float* scratch) {
  const uint8_t* row = w.row(j);
  const int64_t chunks = w.chunks(), subs = chunks * 2 * SUBS, size = round16(subs), step = w.code_bytes();
  float *d = scratch, *m = scratch + size, *scales = m + size;
  expand_scales<SUBS>(w, row, 0, subs, d, m);
  const InputChunk* x[NT];
  F acc[NT];
  each<NT>([&](auto t) SPECSPARSE_EACH {
    x[t] = inputs[t]->chunks;
    acc[t] = zero();
    const float* dx = inputs[t]->scales[SUBS - 1];
    for (int64_t i = 0; i < size; i += 16) store(scales + t * size + i, mul(load(d + i), load(dx + i)));
  });
  for (int64_t c = 0; c < chunks; ++c) {
    __builtin_prefetch(next + c * step, 0, 2);
    if constexpr (READ == Read::kCodes) {  // Q4_0's zero is taken off the sums: signed bytes would cost half as much again
      const Bytes codes = load_nibbles(row + c * step);
      each<NT>([&](auto t) SPECSPARSE_EACH {
        const I sum = dot4_unsigned(MINS ? nullptr : x[t][c].lows, codes, x[t][c].codes);
        acc[t] = fma(spread_scales<SUBS>(scales + t * size + 2 * SUBS * c), to_float(sum), acc[t]);
      });
    } else {
      const uint8_t* p = row + c * step;
      const Bytes codes = READ == Read::kInt8 ? load_bytes(p) : lookup(load_nibbles(p), w.lut), m4 = magnitude(codes);
      each<NT>([&](auto t) SPECSPARSE_EACH {
        const F scale = spread_scales<SUBS>(scales + t * size + 2 * SUBS * c);
        acc[t] = fma(scale, to_float(dot4(m4, codes, x[t][c].codes)), acc[t]);
      });
    }
  }
  for (int64_t at = chunks * step; at < w.row_bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
  each<NT>([&](auto t) SPECSPARSE_EACH {
    if (MINS)
      for (int64_t i = 0; i < size; i += 16) acc[t] = fma(load(m + i), load(inputs[t]->sums[SUBS - 1] + i), acc[t]);
    out[t] = reduce_add(acc[t]);
  });
}

template <int NT, int SIZE, class Load>
__attribute__((flatten)) void dot_floats_row(const NeuronRows& w, int64_t j, const uint8_t* next, const Input* const* inputs,
                                             float* out, Load read) {
  const uint8_t* row = w.row(j);
  const float* x[NT];
  F low[NT], high[NT];
  each<NT>([&](auto t) SPECSPARSE_EACH { x[t] = inputs[t]->x, low[t] = zero(), high[t] = zero(); });
  for (int64_t c = 0, end = w.chunks() * kChunk; c < end; c += 32) {
    const uint8_t* p = row + c * SIZE;
    for (int line = 0; line < 32 * SIZE; line += 64) __builtin_prefetch(next + c * SIZE + line, 0, 2);
    const F a = read(p), b = read(p + 16 * SIZE);
    each<NT>([&](auto t) SPECSPARSE_EACH {
      low[t] = fma(a, load(x[t] + c), low[t]);
      high[t] = fma(b, load(x[t] + c + 16), high[t]);
    });
  }
  each<NT>([&](auto t) SPECSPARSE_EACH { out[t] = reduce_add(add(low[t], high[t])); });
}

// f(bytes of a float, how sixteen of them are read).
template <class F_>
SPECSPARSE_INLINE void with_floats(Codes codes, F_&& f) {
  using std::integral_constant;
  if (codes == Codes::kF16) return f(integral_constant<int, 2>{}, [](const uint8_t* p) { return load_f16(p); });
  if (codes == Codes::kBf16) return f(integral_constant<int, 2>{}, [](const uint8_t* p) { return load_bf16(p); });
  f(integral_constant<int, 4>{}, [](const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); });
}

template <int NT>
void dot_floats_of(const NeuronRows& w, int64_t j, const uint8_t* next, const Input* const* x, float* out) {
  with_floats(w.codes, [&](auto size, auto read) SPECSPARSE_EACH { dot_floats_row<NT, size>(w, j, next, x, out, read); });
}

template <int NT>
void dot_tokens(const NeuronRows& w, int64_t j, const uint8_t* next, const Input* const* x, float* out, float* scratch) {
  if (w.is_float()) return dot_floats_of<NT>(w, j, next, x, out);
  with_row_kind(w, [&](auto kind) SPECSPARSE_EACH {
    using Kind = decltype(kind);
    dot_codes_row<Kind::kRead, Kind::kMins, Kind::kSubs, NT>(w, j, next, x, out, scratch);
  });
}

void dot(const NeuronRows& w, int64_t j, const uint8_t* next, const Input* const* x, int count, float* out, float* scratch) {
  if (!next) next = w.row(j);
  // Where more rows do not fit the registers, two passes over a neuron in the first cache cost little.
  if (w.is_float() && count > kFloatTokens) {
    dot_tokens<2>(w, j, next, x, out, scratch);
    return count == 3 ? dot_tokens<1>(w, j, next, x + 2, out + 2, scratch) : dot_tokens<2>(w, j, next, x + 2, out + 2, scratch);
  }
  switch (count) {
    case 1: return dot_tokens<1>(w, j, next, x, out, scratch);
    case 2: return dot_tokens<2>(w, j, next, x, out, scratch);
    case 3: return dot_tokens<3>(w, j, next, x, out, scratch);
    default: return dot_tokens<4>(w, j, next, x, out, scratch);
  }
}

// dot_codes_row of kRowGroup neurons and one row.
template <Read READ, bool MINS, int SUBS>
__attribute__((flatten)) void dot_codes_group(const NeuronRows& w, const int32_t* js, const uint8_t* const* next, const Input& x,
                                              float* out, float* scratch) {
  const int64_t chunks = w.chunks(), subs = chunks * 2 * SUBS, size = round16(subs);
  const float* dx = x.scales[SUBS - 1];
  const uint8_t* rows[kRowGroup];
  F acc[kRowGroup];
  float* mins = scratch + kRowGroup * size;
  each<kRowGroup>([&](auto r) SPECSPARSE_EACH {
    rows[r] = w.row(js[r]), acc[r] = zero();
    scaled<MINS, SUBS, true>(w, rows[r], 0, subs, dx, scratch + r * size, mins + r * size);
  });
  constexpr int kBytes = READ == Read::kInt8 ? kChunk : kChunk / 2, kAtOnce = 2;  // chunks, so that few lines are fetched twice
  const auto chunk = [&](int64_t c) SPECSPARSE_EACH {
    each<kRowGroup>([&](auto r) SPECSPARSE_EACH {
      const uint8_t* p = rows[r] + c * kBytes;
      I sum;
      if constexpr (READ == Read::kCodes) {
        sum = dot4_unsigned(MINS ? nullptr : x.chunks[c].lows, load_nibbles(p), x.chunks[c].codes);
      } else {
        const Bytes codes = READ == Read::kInt8 ? load_bytes(p) : lookup(load_nibbles(p), w.lut);
        sum = dot4(magnitude(codes), codes, x.chunks[c].codes);
      }
      acc[r] = fma(spread_scales<SUBS>(scratch + r * size + 2 * SUBS * c), to_float(sum), acc[r]);
    });
  };
  int64_t c = 0, at = 0;
  for (; c + kAtOnce <= chunks; c += kAtOnce, at += kAtOnce * kBytes) {
    each<kRowGroup>([&](auto r) SPECSPARSE_EACH { each<kAtOnce * kBytes / 64>([&](auto i) SPECSPARSE_EACH { __builtin_prefetch(next[r] + at + 64 * i, 0, 2); }); });
    chunk(c), chunk(c + 1);
  }
  if (c < chunks) chunk(c);
  for (; at < w.row_bytes; at += 64) each<kRowGroup>([&](auto r) SPECSPARSE_EACH { __builtin_prefetch(next[r] + at, 0, 2); });
  if (MINS)
    for (int64_t i = 0; i < size; i += 16)
      each<kRowGroup>([&](auto r) SPECSPARSE_EACH { acc[r] = fma(load(mins + r * size + i), load(x.sums[SUBS - 1] + i), acc[r]); });
  reduce_add_four(acc, out);
}

// dot_floats_row of NR neurons and one row.
template <int NR, int SIZE, class Load>
__attribute__((flatten)) void dot_floats_group(const NeuronRows& w, const int32_t* js, const uint8_t* const* next, const Input& x,
                                               float* out, Load read) {
  const uint8_t* rows[NR];
  F low[NR], high[NR];
  each<NR>([&](auto r) SPECSPARSE_EACH { rows[r] = w.row(js[r]), low[r] = zero(), high[r] = zero(); });
  for (int64_t c = 0, end = w.chunks() * kChunk; c < end; c += 32) {
    const F a = load(x.x + c), b = load(x.x + c + 16);
    each<NR>([&](auto r) SPECSPARSE_EACH {
      for (int line = 0; line < 32 * SIZE; line += 64) __builtin_prefetch(next[r] + c * SIZE + line, 0, 2);
      const uint8_t* p = rows[r] + c * SIZE;
      low[r] = fma(read(p), a, low[r]);
      high[r] = fma(read(p + 16 * SIZE), b, high[r]);
    });
  }
  each<NR>([&](auto r) SPECSPARSE_EACH { out[r] = reduce_add(add(low[r], high[r])); });
}

void dot_group(const NeuronRows& w, const int32_t* js, const uint8_t* const* next, int count, const Input& x, float* out,
               float* scratch) {
  const Input* one = &x;
  if (count < kRowGroup) {
    for (int i = 0; i < count; ++i) dot_tokens<1>(w, js[i], next[i], &one, out + i, scratch);
    return;
  }
  if (w.is_float()) {
    for (int i = 0; i < kRowGroup; i += kFloatTokens) {
      const auto group = [&](auto size, auto read) SPECSPARSE_EACH {
        dot_floats_group<kFloatTokens, size>(w, js + i, next + i, x, out + i, read);
      };
      with_floats(w.codes, group);
    }
    return;
  }
  with_row_kind(w, [&](auto kind) SPECSPARSE_EACH {
    using Kind = decltype(kind);
    dot_codes_group<Kind::kRead, Kind::kMins, Kind::kSubs>(w, js, next, x, out, scratch);
  });
}

// One sum after the other in each group, so that groups are taken together.
template <int NG, int SIZE, class Load>
__attribute__((flatten)) void dot_float_groups(const Matrix& w, int64_t g, const float* x, float* out, Load read) {
  const uint8_t* groups[NG];
  F acc[NG];
  each<NG>([&](auto i) SPECSPARSE_EACH { groups[i] = w.data + (g + i) * w.group_bytes, acc[i] = zero(); });
  for (int64_t k = 0; k < w.cols; ++k)
    each<NG>([&](auto i) SPECSPARSE_EACH {
      __builtin_prefetch(groups[i] + k * 16 * SIZE + 1024, 0, 2);
      acc[i] = fma(read(groups[i] + k * 16 * SIZE), set1(x[k]), acc[i]);
    });
  each<NG>([&](auto i) SPECSPARSE_EACH { store(out + 16 * i, acc[i]); });
}

void dot_floats(const Matrix& w, int64_t g, int count, const float* x, float* out) {
  with_floats(w.codes, [&](auto size, auto read) SPECSPARSE_EACH {
    if (count == kRowGroup) return dot_float_groups<kRowGroup, size>(w, g, x, out, read);
    for (int i = 0; i < count; ++i) dot_float_groups<1, size>(w, g + i, x, out + 16 * i, read);
  });
}

// Groups of blocks with one scale each, some side by side: the next ones are fetched meanwhile.
template <class Kind>
__attribute__((flatten)) void dot_block_groups(const Matrix& w, int64_t g, int64_t count, const QBlock* x, float* out) {
  constexpr int kSlices = kRows / kSlice, kSide = kBlockGroups, kWide = kSide * kSlices;
  for (int64_t done = 0; done < count; done += kSide) {
    const uint8_t* block[kSide];
    S acc[kWide];
    each<kSide>([&](auto i) SPECSPARSE_EACH { block[i] = w.data + (g + std::min<int64_t>(done + i, count - 1)) * w.group_bytes; });
    each<kWide>([&](auto v) SPECSPARSE_EACH { acc[v] = slice_zero(); });
    for (int64_t b = 0; b < w.cols / kBlock; ++b) {
      const uint8_t* codes[kWide];
      SI dot[kWide][1];
      each<kSide>([&](auto i) SPECSPARSE_EACH {
        each<Kind::kLines>([&](auto line) SPECSPARSE_EACH { __builtin_prefetch(block[i] + kSide * w.group_bytes + 64 * line, 0, 2); });
        each<kSlices>([&](auto s) SPECSPARSE_EACH { codes[kSlices * i + s] = block[i] + Kind::kCodesAt + 4 * kSlice * s; });
      });
      if constexpr (Kind::kRead == Read::kCodes)
        dot_codes<1, kWide>(codes, x + b, dot, w.zero);
      else
        dot_int8<1, kWide, 8, 0>(codes, x + b, dot);
      const S scale = slice_set1(x[b].scale);
      each<kWide>([&](auto v) SPECSPARSE_EACH {
        acc[v] = fma(mul(slice_f16(block[v / kSlices] + 2 * kSlice * (v % kSlices)), scale), to_float(dot[v][0]), acc[v]);
      });
      each<kSide>([&](auto i) SPECSPARSE_EACH { block[i] += Kind::kBytes; });
    }
    each<kWide>([&](auto v) SPECSPARSE_EACH {
      if (done + v / kSlices < count) store(out + kRows * (done + v / kSlices) + kSlice * (v % kSlices), acc[v]);
    });
  }
}

bool dot_blocks(const Matrix& w, int64_t g, int64_t count, const QBlock* x, float* out) {
  if (w.is_float() || w.lut || w.scales != Scales::kD || w.sub != kBlock || w.group_bytes > kNarrowBytes) return false;
  if (w.codes == Codes::kInt8)
    dot_block_groups<BlockKind<Read::kInt8, Scales::kD, 1>>(w, g, count, x, out);
  else
    dot_block_groups<BlockKind<Read::kCodes, Scales::kD, 1>>(w, g, count, x, out);
  return true;
}

// Adds NR neurons to a stripe of the output.
template <Read READ, bool MINS, int SUBS, int NR>
__attribute__((flatten)) void add_codes(const NeuronRows& w, const int32_t* js, const float* a, const int32_t* next,
                                        int64_t begin, int64_t end, float* y, float* scratch) {
  constexpr int kStep = READ == Read::kInt8 ? 1 : kNibbleChunks;
  const int64_t first = begin * 2 * SUBS, subs = (end - begin) * 2 * SUBS, size = round16(subs), step = w.code_bytes();
  float *d = scratch, *m = scratch + NR * size;
  alignas(16) uint16_t halves[16] = {};
  if (READ != Read::kInt8) float_halves(w, halves);
  const NibbleTable table(halves);
  const uint8_t *rows[NR], *ahead[NR];
  each<NR>([&](auto r) SPECSPARSE_EACH {
    rows[r] = w.row(js[r]), ahead[r] = w.row(next[r]);
    scaled<MINS, SUBS, false>(w, rows[r], first, first + subs, a + r, d + r * size, m + r * size);
    // Scales are fetched with the first stripe, all of them.
    for (int64_t at = w.chunks() * step; !begin && at < w.row_bytes; at += 64) __builtin_prefetch(ahead[r] + at, 0, 2);
  });
  for (int64_t c = begin; c < end; c += kStep) {
    float* to = y + (c - begin) * kChunk;
    if constexpr (READ == Read::kInt8) {
      constexpr int kSubs = 2 * SUBS;  // of a chunk
      F sum[4];
      each<4>([&](auto k) SPECSPARSE_EACH { sum[k] = load(to + 16 * k); });
      each<NR>([&](auto r) SPECSPARSE_EACH {
        __builtin_prefetch(ahead[r] + c * step, 0, 2);
        const uint8_t* p = rows[r] + c * step;
        const float *scales = d + r * size + (c - begin) * kSubs, *mins = m + r * size + (c - begin) * kSubs;
        each<4>([&](auto k) SPECSPARSE_EACH { sum[k] = fma(set1(scales[k * kSubs / 4]), load_i8(p + 16 * k), sum[k]); });
        if (MINS) each<4>([&](auto k) SPECSPARSE_EACH { sum[k] = fma(set1(mins[k * kSubs / 4]), set1(a[r]), sum[k]); });
      });
      each<4>([&](auto k) SPECSPARSE_EACH { store(to + 16 * k, sum[k]); });
    } else {
      // A part of each vector at a time: AVX2 has no registers for all sums beside what makes floats of the codes.
      each<16 / kSlice>([&](auto part) SPECSPARSE_EACH {
        constexpr int kPart = decltype(part)::value;
        S sum[4 * kStep];
        each<4 * kStep>([&](auto k) SPECSPARSE_EACH { sum[k] = slice_load(to + 16 * k + kSlice * kPart); });
        each<NR>([&](auto r) SPECSPARSE_EACH {
          if (!kPart) __builtin_prefetch(ahead[r] + c * step, 0, 2);
          const uint8_t* p = rows[r] + c * step;
          const NibbleColumns codes = c + kStep <= end ? load_columns(p) : load_last_columns(p);
          const auto scale = nibble_scales<kPart>(d + r * size + (c - begin) * 2);
          each<4 * kStep>([&](auto k) SPECSPARSE_EACH { sum[k] = fma(scale.of(k), codes.template column<k, kPart>(table), sum[k]); });
          if (MINS) {
            const auto low = nibble_scales<kPart>(m + r * size + (c - begin) * 2);
            each<4 * kStep>([&](auto k) SPECSPARSE_EACH { sum[k] = fma(low.of(k), slice_set1(a[r]), sum[k]); });
          }
        });
        each<4 * kStep>([&](auto k) SPECSPARSE_EACH { store(to + 16 * k + kSlice * kPart, sum[k]); });
      });
    }
  }
}

// Where the table keeps the sum of column c of kChunk * kNibbleChunks.
struct NibbleOrder {
  uint8_t at[kChunk * kNibbleChunks];
  constexpr NibbleOrder() : at() {
    for (int c = 0; c < kChunk * kNibbleChunks; ++c) at[c] = static_cast<uint8_t>(nibble_lane(c));
  }
};
constexpr NibbleOrder kNibbleOrder;

void sum_parts(const NeuronRows& w, const float* const* parts, int count, int64_t chunks, float* out) {
  constexpr int64_t kStep = kChunk * kNibbleChunks;
  for (int64_t c = 0; c < chunks * kChunk; c += kStep) {
    alignas(64) float sums[kStep];
    for (int64_t i = 0; i < kStep; i += 16) {
      F sum = zero();
      for (int k = 0; k < count; ++k) sum = add(sum, load(parts[k] + c + i));
      store(sums + i, sum);
    }
    const int64_t some = std::min(kStep, chunks * kChunk - c);
    if (w.codes != Codes::kNibble)
      std::copy_n(sums, some, out + c);
    else
      for (int64_t i = 0; i < some; ++i) out[c + i] = sums[kNibbleOrder.at[i]];
  }
}

template <int SIZE, int NR, class Load>
__attribute__((flatten)) void add_floats(const NeuronRows& w, const int32_t* js, const float* a, const int32_t* next,
                                         int64_t begin, int64_t end, float* y, Load read) {
  const uint8_t *rows[NR], *ahead[NR];
  F factor[NR];
  each<NR>([&](auto r) SPECSPARSE_EACH { rows[r] = w.row(js[r]), ahead[r] = w.row(next[r]), factor[r] = set1(a[r]); });
  for (int64_t c = begin * kChunk; c < end * kChunk; c += 32) {
    float* to = y + c - begin * kChunk;
    F low = load(to), high = load(to + 16);
    each<NR>([&](auto r) SPECSPARSE_EACH {
      const uint8_t* p = rows[r] + c * SIZE;
      for (int line = 0; line < 32 * SIZE; line += 64) __builtin_prefetch(ahead[r] + c * SIZE + line, 0, 2);
      low = fma(factor[r], read(p), low);
      high = fma(factor[r], read(p + 16 * SIZE), high);
    });
    store(to, low), store(to + 16, high);
  }
}

template <int NR>
void add_neurons(const NeuronRows& w, const int32_t* js, const float* a, const int32_t* next, int64_t begin, int64_t end,
                 float* y, float* s) {
  const auto codes = [&](auto kind) SPECSPARSE_EACH {
    using Kind = decltype(kind);
    constexpr Read kRead = Kind::kRead == Read::kTable ? Read::kCodes : Kind::kRead;  // floats come from a table either way
    add_codes<kRead, Kind::kMins, Kind::kSubs, NR>(w, js, a, next, begin, end, y, s);
  };
  if (with_row_kind(w, codes)) return;
  with_floats(w.codes, [&](auto size, auto read) SPECSPARSE_EACH { add_floats<size, NR>(w, js, a, next, begin, end, y, read); });
}

void add_rows(const NeuronRows& w, const int32_t* js, const float* a, const int32_t* next, int64_t count, int64_t begin,
              int64_t end, float* y, float* scratch) {
  int64_t i = 0;
  for (; i + kRowGroup <= count; i += kRowGroup) add_neurons<kRowGroup>(w, js + i, a + i, next + i, begin, end, y, scratch);
  for (; i < count; ++i) add_neurons<1>(w, js + i, a + i, next + i, begin, end, y, scratch);
}

int64_t differing(const uint64_t* a, const uint64_t* b, int64_t words) {
  int64_t i = 0, found = 0;
  for (; i + kWordsAtOnce <= words; i += kWordsAtOnce) found += count_differing(a + i, b + i);
  for (; i < words; ++i) found += __builtin_popcountll(a[i] ^ b[i]);
  return found;
}

// An FFN with zeros: what the dense kernels give, bit for bit, from the neurons that are not zero. A block of 32 is an exact
// whole number there before its scales are applied, acc = fma(fl(dw * dx), whole number, acc), block after block. A zero adds
// nothing to the whole number, and a block of zeros adds 0 to acc.

// out[i] = row js[i] of Q4_0 times x, i < count <= 16; out has room for sixteen. Four rows at a time are read to their ends: they
// stay in the first cache, and the next ones come from memory side by side.
void dot_neurons(const NeuronRows& w, const int32_t* js, int count, const QBlock* x, int64_t step, const uint8_t* const* next,
                 float* out, float* scratch) {
  static const QBlock kZeros{};
  const int64_t blocks = w.cols / kBlock, chunks = w.chunks(), bytes = w.code_bytes();
  const uint8_t* rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = w.row(js[std::min(i, count - 1)]);
  int32_t* sums = reinterpret_cast<int32_t*>(scratch + 16 * round16(blocks));
  for (int i = 0; i < count; i += 4) {
    const auto fetch = [&](int64_t at) SPECSPARSE_EACH {
      for (int k = i; next && k < std::min(count, i + 4); ++k) __builtin_prefetch(next[k] + at, 0, 2);
    };
    for (int64_t c = 0; c < chunks; ++c) {
      if (c % 2 == 0) fetch(c * bytes);  // whole lines
      const QBlock &even = x[2 * c * step], &odd = 2 * c + 1 < blocks ? x[(2 * c + 1) * step] : kZeros;
      chunk_sums(rows + i, c * bytes, even.q, odd.q, sums + 32 * c + i);
    }
    for (int64_t at = (chunks + 1) / 2 * 64; at < w.row_bytes; at += 64) fetch(at);
  }
  for (int64_t b = 0; b < blocks; b += 16) turn_halves(rows, chunks * bytes + 2 * b, scratch + 16 * b);
  F acc = zero();
  for (int64_t b = 0; b < blocks; ++b) {
    const QBlock& one = x[b * step];
    const I whole = add(load_i(sums + 16 * b), set1_i(-kNibbleZero * one.sum));
    acc = fma(mul(load(scratch + 16 * b), set1(one.scale)), to_float(whole), acc);
  }
  store(out, acc);
}

// The neurons of a block whose code of x is not 0, by twos.
struct LiveNeurons {
  const uint8_t* scales;
  const uint8_t* rows[kBlock];
  int32_t codes[kBlock / 2];  // of two neurons, twice
  int count;                  // even: the last one may stand for two, with a code of 0
  int32_t sum;                // of the codes

  // Of block b, whose codes are x.
  void find(const NeuronBlocks& w, int64_t b, const QBlock& x) {
    count = 0, sum = 0;
    scales = w.data + b * w.block_bytes();
    for (uint32_t left = nonzero_bytes(x.q); left; left &= left - 1, ++count) {
      const int j = __builtin_ctz(left);
      const uint32_t code = static_cast<uint8_t>(x.q[j]) * 0x10001u;
      rows[count] = scales + 2 * w.outputs + j * w.row_bytes();
      codes[count / 2] = static_cast<int32_t>(count % 2 ? codes[count / 2] | code << 8 : code);
      sum += x.q[j];
    }
    if (count % 2) rows[count] = rows[count - 1], ++count;
  }
  // Fetches chunks c and c + 1.
  SPECSPARSE_INLINE void fetch(int64_t c) const {
    for (int i = 0; i < count; ++i) __builtin_prefetch(rows[i] + c * (kChunk / 2), 0, 2);
    for (int at = 0; count && at < 256; at += 64) __builtin_prefetch(scales + 2 * c * kChunk + at, 0, 2);
  }
};

// y += what a block's neurons add to CHUNKS chunks from c on, y's first. Whole numbers are at most 32 * 127 * 8 and fit 16 bits;
// sums of codes without sign on the way may wrap around.
template <int CHUNKS>
SPECSPARSE_INLINE void project_chunks(const LiveNeurons& live, int64_t c, float scale, float* y) {
  Shorts sums[CHUNKS];
  each<CHUNKS>([&](auto k) SPECSPARSE_EACH { sums[k] = set1_shorts(static_cast<int16_t>(-kNibbleZero * live.sum)); });
  for (int i = 0; i < live.count; i += 2)
    each<CHUNKS>([&](auto k) SPECSPARSE_EACH {
      const int64_t at = (c + k) * (kChunk / 2);
      add_pair(live.rows[i] + at, live.rows[i + 1] + at, live.codes[i / 2], &sums[k]);
    });
  each<CHUNKS>([&](auto k) SPECSPARSE_EACH {
    each<kChunk / 16>([&](auto v) SPECSPARSE_EACH {
      float* to = y + k * kChunk + 16 * v;
      const F d = load_f16(live.scales + 2 * (c + k) * kChunk + 32 * v);
      store(to, fma(mul(d, set1(scale)), to_float(sixteen<v>(sums[k])), load(to)));
    });
  });
}

// y += down's outputs of chunks [begin, end), y's first. A block's rows are fetched while the block before is multiplied.
void project(const NeuronBlocks& w, int64_t begin, int64_t end, const QBlock* x, int64_t step, float* y) {
  LiveNeurons live[2];
  live[0].find(w, 0, x[0]);
  for (int64_t c = begin; c < end; c += 2) live[0].fetch(c);
  for (int64_t b = 0; b < w.count; ++b) {
    LiveNeurons &now = live[b % 2], &next = live[(b + 1) % 2];
    next.count = 0;
    if (b + 1 < w.count) next.find(w, b + 1, x[(b + 1) * step]);
    const float scale = x[b * step].scale;
    for (int64_t c = begin; c < end; c += 2) {
      next.fetch(c);
      if (!now.count) continue;
      if (c + 1 < end)
        project_chunks<2>(now, c, scale, y + (c - begin) * kChunk);
      else
        project_chunks<1>(now, c, scale, y + (c - begin) * kChunk);
    }
  }
}

}  // namespace

#define SPECSPARSE_SPARSE_TABLE {dot, dot_group, kGroups, add_rows, sum_parts, dot_floats, dot_blocks, differing, dot_neurons, project}

}  // namespace SPECSPARSE_ISA
}  // namespace specsparse
