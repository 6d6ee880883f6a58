#include "dense/linear.h"

#include <algorithm>

#include "pool/pool.h"
#include "simd/kinds.h"

namespace specsparse {
namespace {

constexpr int64_t kTokenChunk = 64;       // rows of activations that stay in a core's cache
constexpr int64_t kRowsPerItem = 8;       // of a preparation, at most

// Gate and up take their biases before the activation, not when the tile is written.
void add_bias(const Description& w, int64_t group, int tokens, float* y) {
  if (!w.bias) return;
  const int64_t first = group * kRows, count = std::min<int64_t>(kRows, w.matrix.rows - first);
  for (int t = 0; t < tokens; ++t)
    for (int64_t r = 0; r < count; ++r) y[kRows * t + r] += w.bias[first + r];
}

// to = residual + (y + bias); COUNT, where it is not 0, tells the compiler `count`.
template <int COUNT>
void write_row(const float* y, const float* bias, const float* residual, int64_t count, float* to) {
  if (COUNT) count = COUNT;
  float v[kRows];
  for (int64_t r = 0; r < count; ++r) v[r] = bias ? y[r] + bias[r] : y[r];
  if (residual)
    for (int64_t r = 0; r < count; ++r) v[r] = residual[r] + v[r];
  for (int64_t r = 0; r < count; ++r) to[r] = v[r];
}

}  // namespace

int64_t groups_per_item(int64_t groups, int64_t group_bytes) {
  constexpr int64_t kItemBytes = 64 << 10;
  const int64_t even = std::max<int64_t>(1, groups / (16 * threads()));
  return std::clamp<int64_t>(kItemBytes / std::max<int64_t>(group_bytes, 1), 1, even);
}

bool Description::read(const MatrixDescriptor& d, const void* data, int64_t bytes) {
  matrix = {static_cast<const uint8_t*>(data), d.rows, d.cols, d.bytes, Codes(d.codes), Scales(d.scales), d.sub,
            static_cast<int32_t>(d.zero), nullptr};
  bool has_lut = false;
  for (int i = 0; i < 16; ++i) lut[i] = static_cast<int8_t>(d.lut[i]), has_lut |= d.lut[i] != 0;
  if (has_lut) matrix.lut = lut;
  return has_kernels(matrix) && bytes >= matrix.groups() * matrix.group_bytes;
}

Description::Description(const Description& first, int64_t place)
    : matrix(first.matrix), bias(first.bias ? first.bias + place * first.matrix.rows : nullptr) {
  matrix.data += place * matrix.groups() * matrix.group_bytes;
}

int64_t tile_of(int64_t rows) { return rows <= 1 ? 1 : rows <= 4 ? 4 : ops().tile; }

Activations ActivationBuffer::reserve(int64_t rows, int64_t cols, bool quantise) {
  const int64_t blocks = quantise ? cols / kBlock : 0;
  const int64_t tile = tile_of(rows);
  const int64_t whole = (rows + tile - 1) / tile * tile;
  if (static_cast<int64_t>(x.size()) < rows * cols) x.resize(rows * cols);
  if (static_cast<int64_t>(q.size()) < whole * blocks) q.resize(whole * blocks);
  return {cols, blocks, x.data(), q.data(), tile};
}

// Two rows take less time than a second thread needs to hear of them.
int64_t preparation_step(int64_t total) {
  const int64_t count = threads();
  return std::clamp<int64_t>((total + count - 1) / count, 2, kRowsPerItem);
}

int64_t Preparation::items() const { return (total + step - 1) / step; }

void Preparation::run(int64_t item) const {
  for (int64_t i = item * step; i < std::min(total, (item + 1) * step); ++i)
    ops().prepare(from + (rows ? rows[i] : i) * to.cols, norm, eps, to, i, quantise);
}

void NormedSum::run(int64_t item) const {
  thread_local std::vector<float> normed;
  normed.resize(cols);
  for (int64_t i = item * step; i < std::min(total, (item + 1) * step); ++i) {
    const int64_t at = (rows ? rows[i] : i) * cols;
    ops().prepare(y + at, norm, eps, {cols, 0, normed.data(), nullptr}, 0, false);
    for (int64_t c = 0; c < cols; ++c) out[at + c] = x[at + c] + normed[c];
  }
}

Product::Product(const Description* const* weights, int count, const Output* outs, const Activations& x, int64_t total,
                 const int32_t* rows, Act act)
    : x_(x), total_(total), rows_(rows), act_(act) {
  const bool glu = act != Act::kNone;
  int64_t largest = 1;
  first_[0] = 0;
  for (int m = 0; m < count; ++m) weights_[m] = weights[m];
  for (int m = 0; m < (glu ? 1 : count); ++m) {
    outs_[m] = outs[m];
    first_[m + 1] = first_[m] + weights[m]->matrix.groups();
    largest = std::max(largest, weights[m]->matrix.group_bytes * (glu ? 2 : 1));
    step_ = first_[m + 1];
  }
  const int64_t groups = step_;
  step_ = groups_per_item(groups, largest);
  if (ops().dot_groups) step_ = (step_ + kGroupsAtOnce - 1) / kGroupsAtOnce * kGroupsAtOnce;
  parts_ = (groups + step_ - 1) / step_;
  chunks_ = (total + kTokenChunk - 1) / kTokenChunk;
  for (int m = glu ? 1 : count; m < kMost; ++m) first_[m + 1] = first_[m];
}

void Product::run(int64_t item) const {
  const Ops& op = ops();
  const bool glu = act_ != Act::kNone;
  const int64_t groups = first_[kMost];
  const int64_t row0 = item / parts_ * kTokenChunk, row1 = std::min(total_, row0 + kTokenChunk);
  const int64_t g0 = item % parts_ * step_, g1 = std::min(groups, g0 + step_);
  int m = 0;
  for (int64_t g = g0; g < g1;) {
    while (g >= first_[m + 1]) ++m;
    if (op.dot_groups && g + kGroupsAtOnce <= std::min(g1, first_[m + 1]) && run_groups(m, g, row0, row1)) {
      g += kGroupsAtOnce;
      continue;
    }
    const Matrix& w = weights_[m]->matrix;
    alignas(64) float y[kMostTile * kRows], up[kMostTile * kRows];
    for (int64_t row = row0; row < row1; row += op.tile) {
      const int tokens = static_cast<int>(std::min<int64_t>(op.tile, row1 - row));
      op.dot(w, g - first_[m], x_, row, tokens, y);
      if (glu) op.dot(weights_[1]->matrix, g, x_, row, tokens, up);
      finish(m, y, up, row, tokens, g - first_[m]);
    }
    ++g;
  }
  if (op.leave) op.leave();
}

bool Product::run_groups(int m, int64_t g, int64_t row0, int64_t row1) const {
  const Ops& op = ops();
  constexpr int kGroupFloats = kGroupTile * kRows, kMost = kTokenChunk * kGroupsAtOnce * kRows;
  alignas(64) thread_local float y[kMost], up[kMost];
  const int tokens = static_cast<int>(row1 - row0);
  if (!op.dot_groups(weights_[m]->matrix, g - first_[m], x_, row0, tokens, y)) return false;
  if (act_ != Act::kNone) op.dot_groups(weights_[1]->matrix, g, x_, row0, tokens, up);
  int64_t at = 0;
  for (int64_t row = row0; row < row1; row += kGroupTile)
    for (int i = 0; i < kGroupsAtOnce; ++i, at += kGroupFloats)
      finish(m, y + at, up + at, row, static_cast<int>(std::min<int64_t>(kGroupTile, row1 - row)), g + i - first_[m]);
  return true;
}

// `y` becomes act(y) * up where there is one, and is written.
void Product::finish(int m, float* y, float* up, int64_t row, int tokens, int64_t group) const {
  if (act_ != Act::kNone) {
    add_bias(*weights_[0], group, tokens, y);
    add_bias(*weights_[1], group, tokens, up);
    ops().glu(y, up, tokens * kRows, act_);
  }
  write(outs_[m], y, row, tokens, group);
}

void Product::write(const Output& out, const float* y, int64_t row, int tokens, int64_t group) const {
  const int64_t first = group * kRows, count = std::min<int64_t>(kRows, out.width - first);
  for (int t = 0; t < tokens; ++t) {
    const int64_t at = (rows_ ? rows_[row + t] : row + t) * out.width + first;
    float* to = out.data + at;
    const float* from = y + kRows * t;
    const float* bias = out.bias ? out.bias + first : nullptr;
    const float* residual = out.residual ? out.residual + at : nullptr;
    if (count == kRows && !bias)
      write_row<kRows>(from, nullptr, residual, kRows, to);
    else
      write_row<0>(from, bias, residual, count, to);
  }
}

void Product::prefetch(int64_t bytes, int64_t item) const {
  const int64_t group = item % parts_ * step_;
  int m = 0;
  while (group >= first_[m + 1]) ++m;
  const int pair = act_ == Act::kNone ? 1 : 2;
  for (int i = m; i < m + pair; ++i) {
    const Matrix& w = weights_[i]->matrix;
    const int streams = ops().dot_groups ? kGroupsAtOnce : 1;  // groups that are read side by side
    for (int64_t g = group - first_[m]; g < std::min(group - first_[m] + streams, w.groups()); ++g) {
      const int64_t from = g * w.group_bytes, to = std::min(from + bytes / pair / streams, w.groups() * w.group_bytes);
      for (int64_t at = from; at < to; at += 64) __builtin_prefetch(w.data + at, 0, 2);
    }
  }
}

}  // namespace specsparse
