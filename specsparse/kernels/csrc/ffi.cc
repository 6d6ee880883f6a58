// The XLA FFI handlers: they read buffers and attributes, share the work out and call the kernels.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ops.h"
#include "pool.h"
#include "unpack.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace specsparse {
namespace {

using Ints = ffi::Span<const int64_t>;

constexpr int64_t kDescription = 23;  // integers that describe a matrix, its table of 16 included

struct Description {
  Matrix matrix;
  int8_t lut[16];
  const float* bias = nullptr;  // of the outputs, or null
};

// Reads matrix `index` of a description; false if the buffer does not hold it.
bool describe(Ints all, int64_t index, const ffi::AnyBuffer& data, Description* out) {
  if (static_cast<int64_t>(all.size()) < (index + 1) * kDescription) return false;
  const int64_t* d = all.begin() + index * kDescription;
  Matrix& m = out->matrix;
  m = {static_cast<const uint8_t*>(data.untyped_data()), d[4], d[5], d[6], Codes(d[0]), Scales(d[1]), d[2],
       static_cast<int32_t>(d[3]), nullptr};
  bool has_lut = false;
  for (int i = 0; i < 16; ++i) out->lut[i] = static_cast<int8_t>(d[7 + i]), has_lut |= d[7 + i] != 0;
  if (has_lut) m.lut = out->lut;
  return static_cast<int64_t>(data.size_bytes()) >= m.groups() * m.group_bytes;
}

// The rows that count: i < n_valid[b] of each sequence.
std::vector<int32_t> valid_rows(const ffi::Buffer<ffi::S32>& n_valid, int64_t rows) {
  const int64_t batch = n_valid.element_count(), n = batch ? rows / batch : 0;
  std::vector<int32_t> out;
  out.reserve(rows);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t count = std::min<int64_t>(std::max(n_valid.typed_data()[b], 0), n);
    for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<int32_t>(b * n + i));
  }
  return out;
}

// Scratch that a calling thread keeps from call to call.
struct Scratch {
  std::vector<float> x;
  std::vector<QBlock> q;

  Activations reserve(int64_t rows, int64_t cols, bool quantise) {
    const int64_t blocks = quantise ? cols / kBlock : 0;
    if (static_cast<int64_t>(x.size()) < rows * cols) x.resize(rows * cols);
    if (static_cast<int64_t>(q.size()) < rows * blocks) q.resize(rows * blocks);
    return {cols, blocks, x.data(), q.data()};
  }
};

constexpr int64_t kTokenChunk = 64;         // rows of activations that stay in a core's cache
constexpr int64_t kItemBytes = 64 << 10;     // most weight bytes of one item

// Groups one item takes: enough items for balance, few enough that the counter costs nothing.
int64_t groups_per_item(int64_t groups, int64_t group_bytes) {
  const int64_t even = std::max<int64_t>(1, groups / (16 * threads()));
  return std::clamp<int64_t>(kItemBytes / std::max<int64_t>(group_bytes, 1), 1, even);
}

struct Output {
  float* data;
  const float* bias;      // or null
  const float* residual;  // or null
  int64_t width;
};

void write_tile(const Output& out, const float* y, const int32_t* rows, int tokens, int64_t group) {
  const int64_t first = group * kRows, count = std::min<int64_t>(kRows, out.width - first);
  for (int t = 0; t < tokens; ++t) {
    float* to = out.data + rows[t] * out.width + first;
    const float* from = out.residual ? out.residual + rows[t] * out.width + first : nullptr;
    for (int64_t r = 0; r < count; ++r) {
      float v = y[16 * t + r];
      if (out.bias) v += out.bias[first + r];
      to[r] = from ? from[r] + v : v;
    }
  }
}

// Gate and up take their biases before the activation, not when the tile is written.
void add_bias(const Description& w, int64_t group, int tokens, float* y) {
  if (!w.bias) return;
  const int64_t first = group * kRows, count = std::min<int64_t>(kRows, w.matrix.rows - first);
  for (int t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < count; ++r) y[kRows * t + r] += w.bias[first + r];
}

constexpr int kTile = 8;  // rows written at a time

// All matrices times all rows. With `act` the two matrices are gate and up, and one output holds act(gate) * up.
void multiply(const std::vector<Description>& weights, const std::vector<Output>& outs, const Activations& x,
              const std::vector<int32_t>& rows, Act act) {
  const Ops& op = ops();
  const bool glu = act != Act::kNone;
  std::vector<int64_t> first{0};  // of each matrix, in the flat order of groups
  int64_t largest = 1;
  for (size_t m = 0; m < (glu ? 1 : weights.size()); ++m) {
    first.push_back(first.back() + weights[m].matrix.groups());
    largest = std::max(largest, weights[m].matrix.group_bytes * (glu ? 2 : 1));
  }
  const int64_t groups = first.back(), step = groups_per_item(groups, largest);
  const int64_t parts = (groups + step - 1) / step, total = rows.size();
  const int64_t chunks = (total + kTokenChunk - 1) / kTokenChunk;
  parallel(parts * chunks, [&](int64_t item, int) {
    const int64_t row0 = item / parts * kTokenChunk, row1 = std::min(total, row0 + kTokenChunk);
    const int64_t g0 = item % parts * step, g1 = std::min(groups, g0 + step);
    alignas(64) float y[kTile * kRows], up[kTile * kRows];
    size_t m = 0;
    for (int64_t g = g0; g < g1; ++g) {
      while (g >= first[m + 1]) ++m;
      const Matrix& w = weights[m].matrix;
      for (int64_t row = row0; row < row1; row += kTile) {
        const int tokens = static_cast<int>(std::min<int64_t>(kTile, row1 - row));
        op.dot(w, g - first[m], x, row, tokens, y);
        if (glu) {
          op.dot(weights[1].matrix, g, x, row, tokens, up);
          add_bias(weights[0], g, tokens, y);
          add_bias(weights[1], g, tokens, up);
          op.glu(y, up, tokens * kRows, act);
        }
        write_tile(outs[m], y, rows.data() + row, tokens, g - first[m]);
      }
    }
  });
}

ffi::Error linear(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> norm, ffi::Buffer<ffi::F32> residual,
                  ffi::Buffer<ffi::S32> n_valid, ffi::RemainingArgs args, ffi::RemainingRets rets, Ints description,
                  int64_t act, float eps) {
  const int64_t cols = x.dimensions().back(), total = x.element_count() / std::max<int64_t>(cols, 1);
  const bool glu = act != 0;
  std::vector<Description> weights(args.size() / 2);
  std::vector<Output> outs(rets.size());
  bool quantise = false;
  for (size_t m = 0; m < weights.size(); ++m) {
    auto data = args.get<ffi::AnyBuffer>(2 * m);
    auto bias = args.get<ffi::AnyBuffer>(2 * m + 1);
    if (!data || !bias || !describe(description, m, *data, &weights[m]) || weights[m].matrix.cols != cols)
      return ffi::Error::InvalidArgument("specsparse linear: matrix " + std::to_string(m) + " does not fit");
    if (bias->element_count()) weights[m].bias = static_cast<const float*>(bias->untyped_data());
    quantise |= !weights[m].matrix.is_float();
    if (glu && m) continue;
    auto out = rets.get<ffi::AnyBuffer>(m);
    if (!out) return ffi::Error::InvalidArgument("specsparse linear: an output is missing");
    outs[m] = {static_cast<float*>((*out)->untyped_data()), glu ? nullptr : weights[m].bias,
               residual.element_count() ? residual.typed_data() : nullptr, weights[m].matrix.rows};
  }
  const std::vector<int32_t> rows = valid_rows(n_valid, total);
  if (static_cast<int64_t>(rows.size()) < total)
    for (const Output& out : outs) std::fill_n(out.data, total * out.width, 0.0f);
  thread_local Scratch scratch;
  const Activations activations = scratch.reserve(std::max<int64_t>(rows.size(), 1), cols, quantise);
  const Ops& op = ops();
  const float* weight = norm.element_count() ? norm.typed_data() : nullptr;
  const int64_t count = rows.size(), per_item = 8;
  parallel((count + per_item - 1) / per_item, [&](int64_t item, int) {
    for (int64_t i = item * per_item; i < std::min(count, (item + 1) * per_item); ++i)
      op.prepare(x.typed_data() + rows[i] * cols, weight, eps, activations, i, quantise);
  });
  multiply(weights, outs, activations, rows, Act(act));
  return ffi::Error::Success();
}

ffi::Error embed(ffi::AnyBuffer data, ffi::Buffer<ffi::S32> ids, ffi::ResultBuffer<ffi::F32> out, Ints description) {
  Description w;
  if (!describe(description, 0, data, &w)) return ffi::Error::InvalidArgument("specsparse embed: matrix does not fit");
  for (size_t i = 0; i < ids.element_count(); ++i) {
    const int64_t row = std::clamp<int64_t>(ids.typed_data()[i], 0, w.matrix.rows - 1);
    unpack_row(w.matrix, row, out->typed_data() + i * w.matrix.cols);
  }
  return ffi::Error::Success();
}

// Lowest index of the largest value; NaN never wins.
ffi::Error argmax(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::S32> out) {
  const int64_t width = x.dimensions().back(), rows = out->element_count();
  parallel(rows, [&](int64_t row, int) {
    const float* p = x.typed_data() + row * width;
    constexpr int kChunk = 1024;
    float best = -INFINITY;
    int64_t at = 0;
    for (int64_t start = 0; start < width; start += kChunk) {
      const int64_t stop = std::min<int64_t>(width, start + kChunk);
      float top = -INFINITY;
      for (int64_t i = start; i < stop; ++i) top = p[i] > top ? p[i] : top;
      if (!(top > best)) continue;
      best = top;
      for (at = start; p[at] != best;) ++at;
    }
    out->typed_data()[row] = static_cast<int32_t>(at);
  });
  return ffi::Error::Success();
}

struct AttendShape {
  int64_t batch, n, heads, kv_heads, d, capacity, rope;  // rope: rotated pairs of a head
  KvType type;
  bool neox;
};

void rotate(float* x, const float* cos, const float* sin, int64_t pairs, bool neox) {
  for (int64_t i = 0; i < pairs; ++i) {
    float& a = x[neox ? i : 2 * i];
    float& b = x[neox ? i + pairs : 2 * i + 1];
    const float a0 = a, b0 = b;
    a = a0 * cos[i] - b0 * sin[i];
    b = a0 * sin[i] + b0 * cos[i];
  }
}

// For each new row, the new rows it sees (itself last), as slots in position order.
std::vector<std::vector<int32_t>> tails(const int32_t* parents, int64_t n, int64_t count, int64_t length) {
  std::vector<std::vector<int32_t>> out(n);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t parent = parents ? parents[i] : i - 1;
    if (parent >= 0 && parent < i) out[i] = out[parent];
    out[i].push_back(static_cast<int32_t>(length + i));
  }
  return out;
}

ffi::Error attend(ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v, ffi::AnyBuffer cache_k,
                  ffi::AnyBuffer cache_v, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                  ffi::Buffer<ffi::S32> length, ffi::Buffer<ffi::S32> n_valid, ffi::Buffer<ffi::S32> parents,
                  ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> new_k, ffi::Result<ffi::AnyBuffer> new_v,
                  int64_t neox) {
  const auto dims = cache_v.dimensions();
  AttendShape s;
  s.batch = dims[0], s.kv_heads = dims[1], s.capacity = dims[2], s.d = dims[3];
  s.n = q.dimensions()[0] / std::max<int64_t>(s.batch, 1);
  s.heads = q.dimensions()[1] / s.d;
  s.rope = cos.dimensions()[1];
  s.neox = neox != 0;
  const auto type = cache_v.element_type();
  s.type = type == ffi::F32 ? KvType::kF32 : type == ffi::F16 ? KvType::kF16 : KvType::kBf16;
  const int64_t bytes = s.type == KvType::kF32 ? 4 : 2;
  if (s.d % 16 || s.capacity % 16 || s.heads % s.kv_heads || cos.dimensions()[0] < s.capacity)
    return ffi::Error::InvalidArgument("specsparse attend: head size and capacity must be multiples of 16");
  char* keys = static_cast<char*>(new_k->untyped_data());
  char* values = static_cast<char*>(new_v->untyped_data());
  if (keys != cache_k.untyped_data()) std::copy_n(static_cast<const char*>(cache_k.untyped_data()), cache_k.size_bytes(), keys);
  if (values != cache_v.untyped_data()) std::copy_n(static_cast<const char*>(cache_v.untyped_data()), cache_v.size_bytes(), values);

  const Ops& op = ops();
  const int64_t width = s.heads * s.d, kv_width = s.kv_heads * s.d, head_bytes = s.capacity * s.d * bytes;
  const int64_t per_kv = s.heads / s.kv_heads;
  thread_local std::vector<float> rotated;
  if (static_cast<int64_t>(rotated.size()) < s.batch * s.n * width) rotated.resize(s.batch * s.n * width);
  float* queries = rotated.data();
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.d));

  struct Tile {
    int64_t b, g, first, count;
  };
  std::vector<Tile> tiles;
  std::vector<std::vector<std::vector<int32_t>>> seen(s.batch);
  std::vector<int32_t> rows;
  std::vector<int64_t> counts(s.batch);
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t start = std::max<int64_t>(length.typed_data()[b], 0);
    counts[b] = std::clamp<int64_t>(n_valid.typed_data()[b], 0, std::min(s.n, std::max<int64_t>(s.capacity - start, 0)));
    if (parents.element_count()) seen[b] = tails(parents.typed_data() + b * s.n, s.n, counts[b], start);
    for (int64_t i = 0; i < counts[b]; ++i) rows.push_back(static_cast<int32_t>(b * s.n + i));
  }
  if (static_cast<int64_t>(rows.size()) < s.batch * s.n) std::fill_n(out->typed_data(), s.batch * s.n * width, 0.0f);

  const int64_t total = rows.size(), per_item = 4;
  parallel((total + per_item - 1) / per_item, [&](int64_t item, int) {
    std::vector<float> key(s.d);
    for (int64_t r = item * per_item; r < std::min(total, (item + 1) * per_item); ++r) {
      const int64_t row = rows[r], b = row / s.n, i = row % s.n, slot = length.typed_data()[b] + i;
      const int64_t position = seen[b].empty() ? slot : length.typed_data()[b] + static_cast<int64_t>(seen[b][i].size()) - 1;
      const float* c = cos.typed_data() + position * s.rope;
      const float* sn = sin.typed_data() + position * s.rope;
      for (int64_t g = 0; g < s.kv_heads; ++g) {
        std::copy_n(k.typed_data() + row * kv_width + g * s.d, s.d, key.data());
        rotate(key.data(), c, sn, s.rope, s.neox);
        const int64_t head = (b * s.kv_heads + g) * head_bytes;
        op.store_kv(key.data(), v.typed_data() + row * kv_width + g * s.d, s.d, slot, s.type, keys + head, values + head);
      }
      for (int64_t h = 0; h < s.heads; ++h) {
        float* to = queries + row * width + h * s.d;
        std::copy_n(q.typed_data() + row * width + h * s.d, s.d, to);
        rotate(to, c, sn, s.rope, s.neox);
        for (int64_t i = 0; i < s.d; ++i) to[i] *= scale;
      }
    }
  });

  // A tile is up to four (row, head) pairs of one key/value head; smaller ones where there would be too few items.
  int64_t vectors = 0;
  for (int64_t b = 0; b < s.batch; ++b) vectors += counts[b] * s.heads;
  const int64_t size = vectors / kQueries < 4 * threads() ? (vectors > 2 * threads() ? 2 : 1) : kQueries;
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t g = 0; g < s.kv_heads; ++g)
      for (int64_t p = 0; p < counts[b] * per_kv; p += size)
        tiles.push_back({b, g, p, std::min(size, counts[b] * per_kv - p)});
  std::reverse(tiles.begin(), tiles.end());  // the longest rows first
  parallel(tiles.size(), [&](int64_t item, int) {
    const Tile& tile = tiles[item];
    const int64_t start = length.typed_data()[tile.b], head = (tile.b * s.kv_heads + tile.g) * head_bytes;
    AttendTile t{};
    t.k = keys + head, t.v = values + head, t.type = s.type, t.d = s.d, t.queries = static_cast<int>(tile.count);
    const bool tree = !seen[tile.b].empty();
    t.shared = tree ? start : start + tile.first / per_kv + 1;  // a chain: what the tile's first row sees
    std::vector<int32_t> chain;
    if (!tree)
      for (int64_t i = tile.first / per_kv + 1; i <= (tile.first + tile.count - 1) / per_kv; ++i)
        chain.push_back(static_cast<int32_t>(start + i));
    for (int64_t j = 0; j < tile.count; ++j) {
      const int64_t i = (tile.first + j) / per_kv, h = tile.g * per_kv + (tile.first + j) % per_kv;
      const int64_t at = (tile.b * s.n + i) * width + h * s.d;
      t.q[j] = queries + at;
      t.out[j] = out->typed_data() + at;
      t.tail[j] = tree ? seen[tile.b][i].data() : chain.data();
      t.tails[j] = tree ? static_cast<int64_t>(seen[tile.b][i].size()) : i - tile.first / per_kv;
    }
    thread_local std::vector<float> scores;
    const int64_t needed = kQueries * (start + s.n + 48);
    if (static_cast<int64_t>(scores.size()) < needed) scores.resize(needed);
    op.attend(t, scores.data());
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_linear, linear,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<Ints>("description")
                                  .Attr<int64_t>("act")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_embed, embed,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<Ints>("description"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_argmax, argmax,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_attend, attend,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("neox"));

#pragma GCC visibility pop

}  // namespace specsparse

#define SPECSPARSE_EXPORT extern "C" __attribute__((visibility("default")))

SPECSPARSE_EXPORT void specsparse_set_threads(int count) { specsparse::set_threads(count); }
SPECSPARSE_EXPORT int specsparse_threads() { return specsparse::threads(); }
SPECSPARSE_EXPORT int specsparse_set_isa(const char* name) { return specsparse::set_ops(name); }
SPECSPARSE_EXPORT const char* specsparse_isa() { return specsparse::ops().name; }
