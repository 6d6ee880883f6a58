#include "sparse/zero_skip.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "pool/pool.h"

namespace specsparse {
namespace {

constexpr int64_t kMostGroups = 32;   // of an item
constexpr int64_t kMostChunks = 32;   // of an item's outputs: their sums stay in the first cache, and codes come in long pieces
constexpr int64_t kShortRow = 512;    // bytes
constexpr int64_t kSharedBlocks = 8;  // of neurons that rows of activations read in turn
constexpr int64_t kSeveralOf = 8;     // of so many neurons several rows keep one each, or the dense kernels are faster
constexpr int64_t kAhead = 8;         // neurons that are on their way
constexpr int64_t kMostNeurons = 64;  // of an item of a mask: rows of activations that share them find them in the cache

// Whether `count` of `all` neurons are read by themselves sooner than all in order: short pieces come at a lower rate.
bool few_of(int64_t count, int64_t all, int64_t row_bytes) { return count * (row_bytes < kShortRow ? 5 : 3) <= all; }

// Neurons of a list, and those of another matrix that are read after them, if any.
struct Reading {
  const NeuronRows& w;
  const int32_t* js;
  int64_t count;
  const NeuronRows& next;
  const int32_t* then;
  int64_t left;

  // Up to sixteen neurons from `at` on times row `row` of x; how many. Meanwhile those that stand `kAhead` behind them are fetched.
  int64_t multiply(int64_t at, const Activations& x, int64_t row, float* out) const {
    thread_local std::vector<float> scratch;
    const int64_t wanted = (w.chunks() * 2 + 15) / 16 * 16 * 2 * kRows, some = std::min<int64_t>(kRows, count - at);
    if (static_cast<int64_t>(scratch.size()) < wanted) scratch.resize(wanted);
    const uint8_t* ahead[kRows];
    for (int64_t i = 0; i < some; ++i) {
      const int64_t k = at + i + kAhead;
      if (k < count || left <= 0)
        ahead[i] = w.row(js[std::min(k, count - 1)]);
      else
        ahead[i] = next.row(then[std::min(k - count, left - 1)]);
    }
    sparse_ops().dot_neurons(w, js + at, static_cast<int>(some), x.at(row, 0), x.tile, ahead, out, scratch.data());
    return some;
  }
};

}  // namespace

void count_neurons(float* hidden, const uint8_t* keep, int64_t width, int64_t rows, int64_t begin, int64_t end,
                   const SkipCounts& counts) {
  constexpr int64_t kAtOnce = 256;
  for (int64_t first = begin; first < end; first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, end - first);
    int32_t any[kAtOnce] = {}, bits[kAtOnce] = {};  // all of one width, so that the compiler makes vectors of them
    uint8_t kept[kAtOnce] = {};
    for (int64_t t = 0; t < rows; ++t) {
      std::memcpy(bits, hidden + t * width + first, count * sizeof(float));
      if (keep) {
        std::memcpy(kept, keep + t * width + first, count);
        for (int64_t j = 0; j < kAtOnce; ++j) bits[j] &= -static_cast<int32_t>(kept[j]);
        std::memcpy(hidden + t * width + first, bits, count * sizeof(float));
      }
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
                   float* hidden, const Activations& h, const float* residual, float* out, Act act, const SkipCounts& counts,
                   int64_t rows)
    : gate_(gate), up_(up), weights_(weights), z_(z), h_(h), residual_(residual), hidden_(hidden), out_(out),
      groups_(gate->matrix.groups()), rows_(rows), act_(act), counts_(counts) {
  // Long items: what is fetched comes in time, and few of a kernel's sixteen lanes are idle.
  step_ = std::clamp<int64_t>(groups_ / (4 * threads()), 1, kMostGroups);
  const int64_t chunks = weights->down.outputs / kChunk;
  output_items_ = std::min(chunks, std::max<int64_t>(threads(), (chunks + kMostChunks - 1) / kMostChunks));
}

bool ZeroSkip::choose(Union& kept, const int32_t* counts) {
  const int64_t pairs = std::accumulate(counts, counts + rows_, int64_t{0}), all = rows_ * gate_->matrix.rows;
  if (rows_ == 1 ? !few_of(pairs, all, weights_->up.row_bytes) : pairs * kSeveralOf > all) return false;
  kept.list_kept();
  kept_ = &kept;
  step_ = std::clamp<int64_t>(kept.count / (8 * threads() * kRows) * kRows, kRows, kMostNeurons);
  items_ = std::max<int64_t>(1, (kept.count + step_ - 1) / step_);
  return true;
}

// What neurons js with these gates give a row of hidden values; how many are not zero. Meanwhile rows of up and then gates of
// `left` neurons `then` are fetched, unless it is null.
int32_t ZeroSkip::multiply(const int32_t* js, const float* gates, int64_t count, int64_t row, const int32_t* then,
                           int64_t left) const {
  const NeuronRows& up = weights_->up;
  float* to = hidden_ + row * up.rows;
  int32_t nonzero = 0;
  const Reading ups{up, js, count, weights_->gate, then, then ? left : 0};
  for (int64_t i = 0, some; i < count; i += some) {
    alignas(64) float found[kRows], own[kRows] = {};
    some = ups.multiply(i, z_, row, found);
    std::copy_n(gates + i, some, own);
    ops().glu(own, found, kRows, act_);
    for (int64_t k = 0; k < some; ++k) to[js[i + k]] = own[k], nonzero += own[k] != 0;
  }
  return nonzero;
}

void ZeroSkip::hidden_of_kept(int64_t item) const {
  const NeuronRows &gate = weights_->gate, &up = weights_->up;
  const bool closes = act_ == Act::kRelu || act_ == Act::kRelu2;
  const int32_t* all = kept_->neurons.data();
  const int64_t first = item * step_, last = std::min(kept_->count, first + step_);
  const int64_t from = item ? all[first] : 0, to = item + 1 < items_ ? all[last] : up.rows;  // what this item fills
  for (int64_t t = 0; t < rows_; ++t) {
    std::fill(hidden_ + t * up.rows + from, hidden_ + t * up.rows + to, 0.0f);
    int32_t js[kMostNeurons + 1];  // one past the end is written too
    float gates[kMostNeurons + 1];
    int64_t count = 0, live = 0;
    for (int64_t i = first; i < last; ++i) js[count] = all[i], count += kept_->rows[i] >> t & 1;
    const Reading own{gate, js, count, up, js, count};
    for (int64_t i = 0, some; i < count; i += some) {
      alignas(64) float found[kRows];
      some = own.multiply(i, z_, t, found);
      std::copy_n(found, some, gates + i);
    }
    for (int64_t i = 0; i < count; ++i) {  // a closed gate's up is not read
      js[live] = js[i], gates[live] = gates[i];
      live += !closes || !(gates[i] <= 0);  // a NaN is none of a closed gate
    }
    const int32_t nonzero = multiply(js, gates, live, t, all + last, t + 1 < rows_ ? 0 : kept_->count - last);
    if (rows_ > 1) continue;  // counted when all are there
    __atomic_fetch_add(counts_.nonzero, nonzero, __ATOMIC_RELAXED);
    __atomic_fetch_add(counts_.active, nonzero, __ATOMIC_RELAXED);
  }
}

void ZeroSkip::hidden_of_open(int64_t item) const {
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
      count += !(value <= 0);  // a NaN is live
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
  nonzero += multiply(live, gates, count, 0, nullptr, 0);  // rows of up are on their way
  __atomic_fetch_add(counts_.nonzero, nonzero, __ATOMIC_RELAXED);
  __atomic_fetch_add(counts_.active, nonzero, __ATOMIC_RELAXED);
}

bool ZeroSkip::few() const {
  int64_t pairs = 0;
  for (int64_t t = 0; t < rows_; ++t) pairs += __atomic_load_n(counts_.nonzero + t, __ATOMIC_RELAXED);
  return few_of(pairs, rows_ * gate_->matrix.rows, weights_->down.row_bytes());
}

void ZeroSkip::output(int64_t item) const {
  const NeuronBlocks& down = weights_->down;
  const auto bound = [&](int64_t i) { return share_begin(down.outputs / kChunk, static_cast<int>(i), static_cast<int>(output_items_)); };
  const int64_t begin = bound(item), end = bound(item + 1), first = begin * kChunk, count = std::min(z_.cols, end * kChunk) - first;
  // Rows of activations take turns every few blocks, so that the second finds them in the cache.
  const int64_t some = rows_ == 1 ? down.count : kSharedBlocks;
  const int64_t width = (kMostChunks + 1) * kChunk;
  thread_local std::vector<float> sums;
  sums.assign(rows_ * width, 0.0f);
  for (int64_t b = 0; b < down.count; b += some) {
    const NeuronBlocks part{down.data + b * down.block_bytes(), std::min(some, down.count - b), down.outputs};
    for (int64_t t = 0; t < rows_; ++t) {
      const QBlock* h = h_.at(t, b);
      for (int64_t i = 0; i < part.count; ++i) __builtin_prefetch(h + i * h_.tile);  // another core may hold them
      sparse_ops().project(part, begin, end, h, h_.tile, sums.data() + t * width);
    }
  }
  for (int64_t t = 0; t < rows_; ++t) {
    const float *y = sums.data() + t * width, *from = residual_ ? residual_ + t * z_.cols + first : nullptr;
    float* to = out_ + t * z_.cols + first;
    for (int64_t c = 0; c < count; ++c) to[c] = from ? from[c] + y[c] : y[c];
  }
}

void ZeroSkip::prefetch(int64_t bytes, int64_t item) const {
  const Matrix& w = gate_->matrix;
  const int64_t from = item * step_ * w.group_bytes;
  for (int64_t at = from; at < std::min(from + bytes, groups_ * w.group_bytes); at += 64) __builtin_prefetch(w.data + at, 0, 2);
}

}  // namespace specsparse
