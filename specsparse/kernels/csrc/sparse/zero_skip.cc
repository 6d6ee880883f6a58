#include "sparse/zero_skip.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "pool/pool.h"

namespace specsparse {
namespace {

constexpr int64_t kMostGroups = 32;  // of an item
constexpr int64_t kMostChunks = 32;  // of an item's outputs: their sums stay in the first cache, and codes come in long pieces
constexpr int64_t kShortRow = 512;   // bytes

// Whether `count` of `all` neurons are read by themselves sooner than all in order: short pieces come at a lower rate.
bool few_of(int64_t count, int64_t all, int64_t row_bytes) { return count * (row_bytes < kShortRow ? 5 : 3) <= all; }

}  // namespace

void count_neurons(const float* hidden, int64_t width, int64_t rows, int64_t begin, int64_t end,
                   const SkipCounts& counts) {
  constexpr int64_t kAtOnce = 256;
  for (int64_t first = begin; first < end; first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, end - first);
    int32_t any[kAtOnce] = {}, bits[kAtOnce] = {};  // all of one width, so that the compiler makes vectors of them
    for (int64_t t = 0; t < rows; ++t) {
      std::memcpy(bits, hidden + t * width + first, count * sizeof(float));
      int32_t found = 0;
      for (int64_t j = 0; j < kAtOnce; ++j) {
        const int32_t live = (bits[j] & 0x7fffffff) != 0;
        any[j] |= live, found += live;
      }
      __atomic_fetch_add(counts.nonzero + t, found, __ATOMIC_RELAXED);
    }
    int32_t active = 0;
    for (int64_t j = 0; j < kAtOnce; ++j) active += any[j];
    __atomic_fetch_add(counts.active, active, __ATOMIC_RELAXED);
  }
}

ZeroSkip::ZeroSkip(const Description* gate, const Description* up, const SkipWeights* weights, const Activations& z,
                   float* hidden, const Activations& h, const float* residual, float* out, Act act, const SkipCounts& counts)
    : gate_(gate), up_(up), weights_(weights), z_(z), h_(h), residual_(residual), hidden_(hidden), out_(out),
      groups_(gate->matrix.groups()), act_(act), counts_(counts) {
  // Long items: what is fetched comes in time, and few of a kernel's sixteen lanes are idle.
  step_ = std::clamp<int64_t>(groups_ / (4 * threads()), 1, kMostGroups);
  const int64_t chunks = weights->down.outputs / kChunk;
  output_items_ = std::min(chunks, std::max<int64_t>(threads(), (chunks + kMostChunks - 1) / kMostChunks));
}

void ZeroSkip::hidden(int64_t item) const {
  const Matrix& gate = gate_->matrix;
  const NeuronRows& up = weights_->up;
  const int64_t first = item * step_, last = std::min(groups_, first + step_);
  constexpr int64_t kStride = kGroupTile * kRows;
  int32_t live[kMostGroups * kRows + 1];  // one past the end is written too
  alignas(64) float gates[kMostGroups * kRows + kRows];
  int64_t count = 0;
  int32_t nonzero = 0;
  std::fill(hidden_ + first * kRows, hidden_ + std::min(gate.rows, last * kRows), 0.0f);
  alignas(64) float found[kGroupsAtOnce * kStride], ups[kGroupsAtOnce * kStride];
  for (int64_t g = first, next; g < last; g = next) {
    next = g + kGroupsAtOnce;
    const bool together = next <= last && ops().dot_groups && ops().dot_groups(gate, g, z_, 0, 1, found);
    if (!together) ops().dot(gate, g, z_, 0, 1, found), next = g + 1;
    const int64_t before = count, end = std::min(gate.rows, next * kRows);
    for (int64_t r = g * kRows; r < end; ++r) {  // no branch: which are active cannot be guessed
      const float value = found[(r / kRows - g) * kStride + r % kRows];
      live[count] = static_cast<int32_t>(r), gates[count] = value;
      count += value > 0;
    }
    if (!few_of(count - before, end - g * kRows, up.row_bytes)) {
      together ? void(ops().dot_groups(up_->matrix, g, z_, 0, 1, ups)) : ops().dot(up_->matrix, g, z_, 0, 1, ups);
      for (int64_t i = 0; i < next - g; ++i) ops().glu(found + i * kStride, ups + i * kStride, kRows, act_);
      for (; count > before; --count) {
        const int32_t r = live[count - 1];
        hidden_[r] = found[(r / kRows - g) * kStride + r % kRows], nonzero += hidden_[r] != 0;
      }
      continue;
    }
    for (int64_t i = before; i < count; ++i)
      for (int64_t at = 0; at < up.row_bytes; at += 64) __builtin_prefetch(up.row(live[i]) + at, 0, 2);
  }
  thread_local std::vector<float> scratch;
  const int64_t wanted = (up.cols / kBlock + 15) / 16 * 16 * kRows;
  if (static_cast<int64_t>(scratch.size()) < wanted) scratch.resize(wanted);
  for (int64_t i = 0; i < count; i += kRows) {
    const int some = static_cast<int>(std::min<int64_t>(kRows, count - i));
    sparse_ops().dot_neurons(up, live + i, some, z_.q, ups, scratch.data());
    ops().glu(gates + i, ups, kRows, act_);
    for (int k = 0; k < some; ++k) hidden_[live[i + k]] = gates[i + k], nonzero += gates[i + k] != 0;
  }
  __atomic_fetch_add(counts_.nonzero, nonzero, __ATOMIC_RELAXED);
  __atomic_fetch_add(counts_.active, nonzero, __ATOMIC_RELAXED);
}

bool ZeroSkip::few() const {
  return few_of(__atomic_load_n(counts_.active, __ATOMIC_RELAXED), gate_->matrix.rows, weights_->down.row_bytes());
}

void ZeroSkip::output(int64_t item) const {
  const NeuronBlocks& down = weights_->down;
  const auto bound = [&](int64_t i) { return share_begin(down.outputs / kChunk, static_cast<int>(i), static_cast<int>(output_items_)); };
  const int64_t begin = bound(item), end = bound(item + 1);
  for (int64_t b = 0; b < h_.blocks; ++b) __builtin_prefetch(h_.q + b);  // another core may hold them
  alignas(64) float y[(kMostChunks + 1) * kChunk];
  std::fill_n(y, (end - begin) * kChunk, 0.0f);
  sparse_ops().project(down, begin, end, h_.q, y);
  for (int64_t c = begin * kChunk, i = 0; c < std::min(z_.cols, end * kChunk); ++c, ++i) out_[c] = residual_ ? residual_[c] + y[i] : y[i];
}

void ZeroSkip::prefetch(int64_t bytes, int64_t item) const {
  const Matrix& w = gate_->matrix;
  const int64_t from = item * step_ * w.group_bytes;
  for (int64_t at = from; at < std::min(from + bytes, groups_ * w.group_bytes); at += 64) __builtin_prefetch(w.data + at, 0, 2);
}

}  // namespace specsparse
