// Distributions of single rows and draws from them, with the definitions of engine/sampling/probs.py.
#include "sampling/rows.h"

#include <algorithm>
#include <cmath>

#include "pool/pool.h"
#include "simd/ops.h"

namespace ffi = xla::ffi;

namespace specsparse {

void Row::make_room(int64_t count) {
  width = (count + kSumBlock - 1) / kSumBlock * kSumBlock;
  e.resize(width), sums.resize(width / kSumBlock);
  std::fill(e.begin() + count, e.end(), 0.0f);
}

void Row::load(const float* logits, int64_t count) {
  make_room(count);
  x.resize(width), maxima.resize(width / kMaxBlock);
  std::copy_n(logits, count, x.begin());
  std::fill(x.begin() + count, x.end(), kLowest);
  ops().block_maxima(x.data(), width, maxima.data());
}

namespace {

// The tree of sums of neighbouring pairs as a heap: node i has the children 2i and 2i + 1, the root is 1.
void pair_tree(const float* leaves, int64_t count, std::vector<float>* heap) {
  int64_t size = 1;
  while (size < count) size *= 2;
  heap->assign(2 * size, 0.0f);
  std::copy_n(leaves, count, heap->begin() + size);
  for (int64_t i = size - 1; i; --i) (*heap)[i] = (*heap)[2 * i] + (*heap)[2 * i + 1];
}

float mass(Row* row, std::vector<float>* heap) {
  ops().block_sums(row->e.data(), row->width, row->sums.data());
  pair_tree(row->sums.data(), row->sums.size(), heap);
  return (*heap)[1];
}

// The k-th largest logit among those >= floor, or `floor` if there are fewer.
float kth_largest(Row* row, int64_t k, float floor) {
  float from = floor;
  if (k <= static_cast<int64_t>(row->maxima.size())) {  // k block maxima are k logits: a bound from below
    std::vector<float> m = row->maxima;
    std::nth_element(m.begin(), m.begin() + (k - 1), m.end(), std::greater<float>());
    from = std::max(floor, m[k - 1]);
  }
  row->picked.clear();
  row->visit(from, [&](int64_t i) { row->picked.push_back(row->x[i]); });
  if (k > static_cast<int64_t>(row->picked.size())) return floor;
  std::nth_element(row->picked.begin(), row->picked.begin() + (k - 1), row->picked.end(), std::greater<float>());
  return row->picked[k - 1];
}

// The largest x above which the weights of the logits x >= from that `counts` reach `wanted`, or the lowest such x.
template <class F>
float select(Row* row, float from, F counts, double wanted) {
  struct Candidate {
    float x, e;
  };
  thread_local std::vector<Candidate> c;
  c.clear();
  row->visit(from, [&](int64_t i) {
    if (counts(i)) c.push_back({row->x[i], row->e[i]});
  });
  double above = 0;
  int64_t low = 0, high = c.size();
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    std::nth_element(c.begin() + low, c.begin() + middle, c.begin() + high,
                     [](const Candidate& a, const Candidate& b) { return a.x > b.x; });
    double part = 0;
    for (int64_t i = low; i < middle; ++i) part += c[i].e;
    if (above + part >= wanted) {
      high = middle;
    } else {
      above += part, low = middle;
    }
  }
  return c[low].x;
}

// The largest logit threshold above which the weights reach `wanted`: in which of many narrow ranges of logits it lies, by
// one pass, and then a selection inside that range, halving the candidates.
float mass_threshold(Row* row, double wanted, double total, float top, float temperature, float floor) {
  constexpr int kRanges = 512;
  double weight[kRanges];
  // Most distributions end within the first few nats; the rest below the second depth is surely too little to matter.
  // Of a float: the double one is of glibc 2.29. What it says changes the ranges and not the threshold.
  const float second = std::log(static_cast<float>(row->width / std::max(total - wanted, 1e-30)));
  for (float depth = 4.0f;; depth = depth < second ? second : 2.0f * depth) {
    const float from = std::max(floor, top - depth * temperature), scale = kRanges / (depth * temperature);
    const auto range = [&](float x) {
      const float r = (top - x) * scale;  // monotone; NaN where a logit is none, which must stay inside too
      return r > 0 ? r < kRanges ? static_cast<int>(r) : kRanges - 1 : 0;
    };
    std::fill_n(weight, kRanges, 0.0);
    row->visit(from, [&](int64_t i) { weight[range(row->x[i])] += row->e[i]; });
    double above = 0;  // weight of what is surely kept
    int last = -1;
    for (int r = 0; r < kRanges && above < wanted; ++r)
      if (weight[r] > 0) last = r, above += weight[r];
    if (above < wanted && from > floor) continue;
    if (last < 0) return floor;
    const float near = std::max(from, top - (last + 2) / scale);
    return select(row, near, [&](int64_t i) { return range(row->x[i]) == last; }, wanted - (above - weight[last]));
  }
}

// The first place of a value that is there.
int64_t first_of(const float* x, int64_t count, float value) {
  int64_t start = 0;
  for (; start + kMaxBlock <= count; start += kMaxBlock) {
    int found = 0;
    for (int64_t i = 0; i < kMaxBlock; ++i) found |= x[start + i] == value;
    if (found) break;
  }
  return std::find(x + start, x + count, value) - x;
}

}  // namespace

Weighed weigh_row(const float* logits, int64_t count, const Shape& shape, float top, Row* into) {
  thread_local std::vector<float> heap;
  Row& row = *into;
  if (!(top > kLowest) || shape.temperature <= 0.0f) return {top > kLowest ? first_of(logits, count, top) : 0};
  row.load(logits, count);
  const float t = shape.temperature;
  float floor = std::numeric_limits<float>::lowest();
  if (shape.log_min_p > kLowest) {  // the lowest logit that min-p keeps; the division decides, beyond any rounding of it
    float lowest = top;
    const float about = top + t * shape.log_min_p, slack = 1e-5f * (std::fabs(top) + std::fabs(t * shape.log_min_p));
    row.visit(about - slack, [&](int64_t i) {
      if ((row.x[i] - top) / t >= shape.log_min_p) lowest = std::min(lowest, row.x[i]);
    });
    floor = std::max(floor, lowest);
  }
  if (shape.top_k < count) floor = std::max(floor, kth_largest(&row, std::max<int64_t>(shape.top_k, 1), floor));
  auto weigh = [&](float from) {
    ops().exp_shifted(row.x.data(), row.width, top, t, row.e.data());
    for (int64_t i = 0; i < row.width; ++i) row.e[i] = row.x[i] >= from ? row.e[i] : 0.0f;
    return mass(&row, &heap);
  };
  float total = weigh(floor);
  if (shape.top_p < 1.0f) {
    const float threshold = mass_threshold(&row, std::max(shape.top_p * total, 1e-30f), total, top, t, floor);
    for (int64_t i = 0; i < row.width; ++i) row.e[i] = row.x[i] >= threshold ? row.e[i] : 0.0f;
    total = mass(&row, &heap);
  }
  return {-1, total};
}

bool probs_row(const float* logits, int64_t count, const Shape& shape, float* p) {
  thread_local Row row;
  bool wild;
  const float top = ops().peak(logits, count, &wild);
  const Weighed weighed = weigh_row(logits, count, shape, top, &row);
  if (weighed.only >= 0) {
    std::fill_n(p, count, 0.0f);
    p[weighed.only] = 1.0f;
  } else {
    const float* e = row.e.data();
    for (int64_t i = 0; i < count; ++i) p[i] = e[i] / weighed.total;
  }
  return !wild && top > kLowest;
}

float mass(Row* row) {
  thread_local std::vector<float> heap;
  return mass(row, &heap);
}

namespace {

// Leaf that two uniforms choose: `far` decides the upper half of the levels, `near` the lower. A leaf of sum 0 is never
// reached unless all are 0.
int64_t descend(const std::vector<float>& heap, float near, float far) {
  const int64_t leaves = heap.size() / 2;
  int depth = 0;
  while (int64_t{1} << depth < leaves) ++depth;
  int64_t node = 1;
  float t = far * heap[1];
  for (int level = 0; level < depth; ++level) {
    if (level == depth / 2) t = near * heap[node];  // anew, with all the bits that a uniform has
    const float left = heap[2 * node], right = heap[2 * node + 1];
    const bool go_right = t >= left && right > 0.0f;  // rounding may leave t beyond the last token that counts
    if (go_right) t -= left;
    node = 2 * node + go_right;
  }
  return node - leaves;
}

}  // namespace

int32_t draw_from(Row* row, const float* u) {
  thread_local std::vector<float> heap;
  mass(row, &heap);
  const int64_t block = descend(heap, u[2], u[3]);
  pair_tree(row->e.data() + block * kSumBlock, kSumBlock, &heap);
  return static_cast<int32_t>(block * kSumBlock + descend(heap, u[0], u[1]));
}

namespace {

int32_t draw_row(const float* p, int64_t count, const float* u) {
  thread_local Row row;
  row.make_room(count);
  for (int64_t i = 0; i < count; ++i) row.e[i] = p[i] > 0.0f ? p[i] : 0.0f;
  return draw_from(&row, u);
}

// The draw of `draw_row` from the output of `probs_row`, the probability of `token`, and whether the row has a distribution.
struct Drawn {
  int32_t drawn;
  float share;
  bool ok;
};

Drawn sample_row(const float* logits, int64_t count, const Shape& shape, const float* u, int64_t token) {
  thread_local Row row;
  bool wild;
  const float top = ops().peak(logits, count, &wild);
  const bool ok = !wild && top > kLowest;
  const Weighed weighed = weigh_row(logits, count, shape, top, &row);
  if (weighed.only >= 0) return {static_cast<int32_t>(weighed.only), weighed.only == token ? 1.0f : 0.0f, ok};
  const float share = token >= 0 && token < count ? row.e[token] / weighed.total : 0.0f;
  for (int64_t i = 0; i < row.width; ++i) {
    const float p = row.e[i] / weighed.total;
    row.e[i] = p > 0.0f ? p : 0.0f;
  }
  return {draw_from(&row, u), share, ok};
}

// Whether each row has a distribution: no NaN, no +inf, and something above -inf.
ffi::Error check(ffi::Buffer<ffi::F32> logits, ffi::ResultBuffer<ffi::PRED> out) {
  const int64_t rows = logits.dimensions()[0], width = logits.dimensions()[1];
  parallel(rows, [&](int64_t r) {
    bool wild;
    const float top = ops().peak(logits.typed_data() + r * width, width, &wild);
    out->typed_data()[r] = !wild && top > kLowest;
  });
  return ffi::Error::Success();
}

ffi::Error probs(Floats logits, Floats temperature, Floats log_min_p, Ints32 top_k, Floats top_p,
               ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = logits.dimensions()[0], width = logits.dimensions()[1];
  const Shapes shapes{temperature, log_min_p, top_k, top_p};
  parallel(rows, [&](int64_t r) {
    probs_row(logits.typed_data() + r * width, width, shapes.of(r), out->typed_data() + r * width);
  });
  return ffi::Error::Success();
}

ffi::Error draw(ffi::Buffer<ffi::F32> p, ffi::Buffer<ffi::F32> u, ffi::ResultBuffer<ffi::S32> out) {
  const int64_t rows = p.dimensions()[0], width = p.dimensions()[1];
  if (static_cast<int64_t>(u.element_count()) != rows * kUniforms)
    return ffi::Error::InvalidArgument("specsparse draw: rows and uniforms do not go together");
  parallel(rows, [&](int64_t r) {
    out->typed_data()[r] = draw_row(p.typed_data() + r * width, width, u.typed_data() + r * kUniforms);
  });
  return ffi::Error::Success();
}

// check, probs and draw in one pass, without writing probabilities down, of rows i < n_valid[b] of each sequence; the other
// rows are 0, true, 0. Parameters are those of the sequence. `u` may be empty if all are greedy, and `tokens` if no share is
// asked for.
ffi::Error sample(Floats logits, Floats temperature, Floats log_min_p, Ints32 top_k, Floats top_p, Floats u, Ints32 tokens,
                  Ints32 n_valid, ffi::ResultBuffer<ffi::S32> drawn, ffi::ResultBuffer<ffi::PRED> ok,
                  ffi::ResultBuffer<ffi::F32> share) {
  const int64_t rows = logits.dimensions()[0], width = logits.dimensions()[1], batch = n_valid.element_count();
  const int64_t n = batch ? rows / batch : 0;
  const auto fits = [&](int64_t count, int64_t wanted) { return count == 0 || count == wanted; };
  const Shapes shapes{temperature, log_min_p, top_k, top_p};
  if (batch * n != rows || shapes.count() != batch || !fits(u.element_count(), rows * kUniforms) ||
      !fits(tokens.element_count(), rows))
    return ffi::Error::InvalidArgument("specsparse sample: rows, sequences and uniforms do not go together");
  static constexpr float nobody[kUniforms] = {};
  thread_local std::vector<int64_t> wanted;
  wanted.clear();
  for (int64_t r = 0; r < rows; ++r) {
    drawn->typed_data()[r] = 0, ok->typed_data()[r] = true, share->typed_data()[r] = 0.0f;
    if (r % n < n_valid.typed_data()[r / n]) wanted.push_back(r);
  }
  parallel(wanted.size(), [&, at = wanted.data()](int64_t i) {
    const int64_t r = at[i], b = r / n;
    const Drawn d = sample_row(logits.typed_data() + r * width, width, shapes.of(b),
                               u.element_count() ? u.typed_data() + r * kUniforms : nobody,
                               tokens.element_count() ? tokens.typed_data()[r] : -1);
    drawn->typed_data()[r] = d.drawn, ok->typed_data()[r] = d.ok, share->typed_data()[r] = d.share;
  });
  return ffi::Error::Success();
}

// The outputs that a draft needs: a token drawn from each row, whether the row has a distribution, and its probabilities over a
// larger vocabulary, where column i is the token ids[i], or i if there are no ids. Parameters are the first row's if there are
// no others.
ffi::Error propose(Floats logits, Floats temperature, Floats log_min_p, Ints32 top_k, Floats top_p, Floats u, Ints32 ids,
                   ffi::ResultBuffer<ffi::S32> drawn, ffi::ResultBuffer<ffi::PRED> ok, ffi::ResultBuffer<ffi::F32> q) {
  const int64_t rows = logits.dimensions()[0], width = logits.dimensions()[1], wide = q->dimensions()[1];
  const Shapes shapes{temperature, log_min_p, top_k, top_p};
  const int64_t known = ids.element_count();
  if ((shapes.count() != rows && shapes.count() != 1) || static_cast<int64_t>(u.element_count()) != rows * kUniforms ||
      (known && known != width) || width > wide)
    return ffi::Error::InvalidArgument("specsparse propose: rows, uniforms and ids do not go together");
  parallel(rows, [&](int64_t r) {
    thread_local Row row;
    row.make_room(width);
    float* p = row.e.data();
    ok->typed_data()[r] = probs_row(logits.typed_data() + r * width, width, shapes.of(shapes.count() == 1 ? 0 : r), p);
    float* out = q->typed_data() + r * wide;
    if (known) {
      std::fill_n(out, wide, 0.0f);
      for (int64_t i = 0; i < width; ++i) {
        const int64_t id = ids.typed_data()[i];
        if (id >= 0 && id < wide) out[id] = p[i];
      }
    } else {
      std::copy_n(p, width, out);
      std::fill(out + width, out + wide, 0.0f);
    }
    for (int64_t i = 0; i < width; ++i) p[i] = p[i] > 0.0f ? p[i] : 0.0f;
    drawn->typed_data()[r] = draw_from(&row, u.typed_data() + r * kUniforms);
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_check, check, (results<ffi::Buffer<ffi::PRED>>(args<Floats>())));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_probs, probs,
                              (results<Floats>(args<Floats, Floats, Floats, Ints32, Floats>())));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_draw_token, draw, (results<Ints32>(args<Floats, Floats>())));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_sample, sample,
                              (results<Ints32, ffi::Buffer<ffi::PRED>, Floats>(
                                  args<Floats, Floats, Floats, Ints32, Floats, Floats, Ints32, Ints32>())));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_propose, propose,
                              (results<Ints32, ffi::Buffer<ffi::PRED>, Floats>(
                                  args<Floats, Floats, Floats, Ints32, Floats, Floats, Ints32>())));

#pragma GCC visibility pop

}  // namespace specsparse
