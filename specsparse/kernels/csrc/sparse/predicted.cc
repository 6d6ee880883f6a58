#include "sparse/predicted.h"

#include <algorithm>

#include "pool/pool.h"

namespace specsparse {
namespace {

constexpr int64_t kSignNeurons = 256;     // of one item
constexpr int64_t kFewBytes = 128 << 10;  // of a matrix that one thread reads sooner than another hears of it
constexpr int64_t kLeastBytes = 6 << 10;  // of an item of a matrix of blocks
constexpr int64_t kRangedBytes = 512 << 10;  // of what chooses neurons: more is shared out more evenly by itself

template <class T>
void grow(std::vector<T>& v, int64_t size) {
  if (static_cast<int64_t>(v.size()) < size) v.resize(size);
}

Preparation preparation(const Description* reader, const float* from, const float* norm, float eps, int64_t total,
                        ActivationBuffer& activations) {
  const bool quantise = reader && !reader->matrix.is_float();
  const int64_t cols = reader ? reader->matrix.cols : 0;
  return {from, norm, eps, quantise, total, nullptr, activations.reserve(total, cols, quantise)};
}

Product product(const Description* w, float* to, const Preparation& from) {
  const Output out{to, nullptr, nullptr, w->matrix.rows};
  return Product(&w, 1, &out, from.to, from.total, nullptr, Act::kNone);
}

}  // namespace

void pack_signs_of(const float* x, int64_t columns, uint64_t* to) {
  std::fill_n(to, (columns + 63) / 64, uint64_t{0});
  for (int64_t c = 0; c < columns; ++c) to[c / 64] |= static_cast<uint64_t>(x[c] < 0) << (c % 64);
}

void PredictedWork::reserve(const PredictedWeights& w, int64_t total) {
  const int64_t neurons = w.ffn.up.rows;  // scores are written by whole groups
  if (w.choice == Choice::kScores) grow(hidden, total * w.first->matrix.rows + kRows), grow(scores, total * neurons + kRows);
  if (w.choice == Choice::kSigns) grow(bits, total * ((w.ffn.up.cols + 63) / 64));
  grow(keep, total * neurons);
  grow(rows, total);
  for (int64_t i = 0; i < total; ++i) rows[i] = static_cast<int32_t>(i);
}

PredictedFfn::PredictedFfn(const PredictedWeights& w, float* x, int64_t total, float eps, ActivationBuffer& activations,
                           PredictedWork& work, const SparseCounts& counts)
    : weights_(&w), x_(x), total_(total), width_(w.ffn.up.cols), neurons_(w.ffn.up.rows),
      ranged_(by_ranges()), work_(&work), counts_(counts), prepare_first_(preparation(w.first, x, w.norm, eps, total, activations)),
      prepare_second_(preparation(w.second, work.hidden.data(), nullptr, eps, total, activations)) {
  if (!scores()) return;
  products_.push_back(product(w.first, work.hidden.data(), prepare_first_));
  products_.push_back(product(w.second, work.scores.data(), prepare_second_));
}

int64_t PredictedFfn::items(int step) const {
  switch (step) {
    case kBegin: return total_ ? 1 : 0;
    case kPrepareFirst: return scores() ? prepare_first_.items() : 0;
    case kFirst: return (scores() ? product_items(0) : 0) + ranged_;
    case kPrepareSecond: return scores() ? prepare_second_.items() : 0;
    case kSecond: return ranged_ ? 0 : prepared() + (scores() ? product_items(1) : match_items());
    case kKeep: return ranged_ || match_items() || (scores() && total_ == 1) ? 0 : total_;
    case kCollect: return total_ && !ranged_ ? 1 : 0;
    case kHidden: return hidden_items_;
    case kProject: return project_items_;
    case kSum: return sum_items_;
    default: return prepared();
  }
}

void PredictedFfn::run(int step, int64_t item) {
  SparseSteps& steps = *work_->steps;
  switch (step) {
    case kBegin: return begin();
    case kPrepareFirst: return prepare_first_.run(item);
    case kFirst:
      if (ranged_ && item + 1 == items(kFirst)) return steps.prepare(x_, 0);
      return multiply(0, item);
    case kPrepareSecond: {
      const int64_t width = weights_->first->matrix.rows, first = item * prepare_second_.step;
      const int64_t last = std::min(total_, first + prepare_second_.step);
      float* h = work_->hidden.data();
      for (int64_t i = first * width; weights_->relu && i < last * width; ++i) h[i] = h[i] < 0 ? 0.0f : h[i];
      return prepare_second_.run(item);
    }
    case kSecond:  // the rows that the neurons will read are prepared beside it
      if (item < prepared()) return steps.prepare(x_, item);
      item -= prepared();
      return scores() ? multiply(1, item) : match_signs(item * kSignNeurons, std::min(neurons_, (item + 1) * kSignNeurons));
    case kKeep: return keep(item);
    case kCollect: return collect();
    case kHidden: return ranged_ ? run_range(item) : steps.hidden(item);
    case kJoin:
      steps.join(item);
      if (!item) counts_.read = steps.read(), counts_.active = steps.active();
      return;
    case kProject: return steps.project(item);
    case kSum: return steps.sum(item, x_, x_);
  }
}

// Groups of an item of a single row's product.
int64_t PredictedFfn::item_groups(const Description& w) const {
  const int64_t groups = w.matrix.groups(), bytes = w.matrix.group_bytes, some = at_once(w);
  if (groups * bytes <= kFewBytes && &w == weights_->first) return groups;
  if (w.matrix.is_float()) return some;
  return (std::max(groups_per_item(groups, bytes), kLeastBytes / bytes) + some - 1) / some * some;
}

int64_t PredictedFfn::product_items(int which) const {
  if (total_ > 1) return products_[which].items();
  const Description& w = which ? *weights_->second : *weights_->first;
  return (w.matrix.groups() + item_groups(w) - 1) / item_groups(w);
}

void PredictedFfn::multiply(int which, int64_t item) {
  if (total_ > 1) return products_[which].run(item);
  const Description& w = which ? *weights_->second : *weights_->first;
  multiply_row(which, item * item_groups(w), std::min(w.matrix.groups(), (item + 1) * item_groups(w)));
}

// A single row times groups [first, last) of a matrix and, of the second, which neurons it keeps.
void PredictedFfn::multiply_row(int which, int64_t first, int64_t last) {
  const Description& w = which ? *weights_->second : *weights_->first;
  const int64_t some = at_once(w);
  const Activations& x = (which ? prepare_second_ : prepare_first_).to;
  float* to = (which ? work_->scores : work_->hidden).data();
  if (!sparse_ops().dot_blocks(w.matrix, first, last - first, x.q, to + first * kRows)) {
    for (int64_t g = first; g < last; g += some)
      multiply_groups(w.matrix, g, static_cast<int>(std::min(some, last - g)), x, to + g * kRows);
    if (ops().leave) ops().leave();
  }
  const int64_t from = first * kRows, until = std::min(w.matrix.rows, last * kRows);
  if (which) keep_some(to + from, until - from, work_->keep.data() + from);
}

// A single row times `count` groups from g on, no more than `at_once`: what `Product` gives. There is room for whole groups.
void PredictedFfn::multiply_groups(const Matrix& w, int64_t g, int count, const Activations& x, float* to) {
  if (w.is_float()) return sparse_ops().dot_floats(w, g, count, x.x, to);
  alignas(64) float y[kGroupsAtOnce * kGroupTile * kRows];
  if (count == kGroupsAtOnce && ops().dot_groups && ops().dot_groups(w, g, x, 0, 1, y))
    for (int i = 0; i < count; ++i) std::copy_n(y + i * kGroupTile * kRows, kRows, to + i * kRows);
  else
    for (int i = 0; i < count; ++i) ops().dot(w, g + i, x, 0, 1, to + i * kRows);
}

void PredictedFfn::prefetch(int64_t bytes, int self, int threads) const {
  if (!scores()) return;
  // Where one thread reads the whole of the first matrix, the others begin with their share of the second.
  if (total_ > 1 || product_items(0) > 1) return products_[0].prefetch(bytes, self, threads);
  const Matrix& w = weights_->second->matrix;
  const int64_t items = product_items(1), step = item_groups(*weights_->second);
  const int64_t from = share_begin(items, self, threads) * step * w.group_bytes;
  const int64_t to = std::min(share_begin(items, self + 1, threads) * step, w.groups()) * w.group_bytes;
  for (int64_t at = from; at < to; at += 64) __builtin_prefetch(w.data + at, 0, 2);
}

void PredictedFfn::pack_signs() {
  const int64_t words = (width_ + 63) / 64;
  for (int64_t t = 0; t < total_; ++t) pack_signs_of(x_ + t * width_, width_, work_->bits.data() + t * words);
}

int64_t PredictedFfn::match_items() const {
  return weights_->choice == Choice::kSigns ? (neurons_ + kSignNeurons - 1) / kSignNeurons : 0;
}

void PredictedFfn::match_signs(int64_t first, int64_t last) {
  const int64_t words = (width_ + 63) / 64;
  const auto differing = sparse_ops().differing;
  for (int64_t j = first; j < last; ++j)
    for (int64_t t = 0; t < total_; ++t) {
      const int64_t apart = differing(work_->bits.data() + t * words, weights_->signs + j * words, words);
      work_->keep[t * neurons_ + j] = static_cast<float>(width_ - apart) >= weights_->threshold;
    }
}

void PredictedFfn::keep(int64_t row) {
  uint8_t* to = work_->keep.data() + row * neurons_;
  if (!scores()) return void(std::fill_n(to, neurons_, uint8_t{1}));
  keep_some(work_->scores.data() + row * neurons_, neurons_, to);
}

void PredictedFfn::keep_some(const float* scores, int64_t count, uint8_t* to) const {
  const float threshold = weights_->threshold;
  for (int64_t j = 0; j < count; ++j) to[j] = scores[j] >= threshold;
}

// Where the neurons are chosen by few bytes, and their segments are of whole groups.
bool PredictedFfn::by_ranges() const {
  if (total_ != 1 || weights_->masked || neurons_ % (SparseSteps::kSegments * kRows) || !SparseSteps::takes_ranges()) return false;
  if (scores()) return weights_->second->matrix.groups() * weights_->second->matrix.group_bytes <= kRangedBytes;
  return weights_->choice == Choice::kAll || neurons_ * width_ / 8 <= kRangedBytes;
}

void PredictedFfn::begin() {
  SparseSteps& steps = *work_->steps;
  if (!weights_->masked) steps.begin(weights_->ffn, work_->rows.data(), total_, &counts_);
  if (weights_->choice == Choice::kSigns) pack_signs();
  if (ranged_) hidden_items_ = steps.begin_ranges(), project_items_ = 0, sum_items_ = steps.sum_items();
}

void PredictedFfn::run_range(int64_t range) {
  SparseSteps& steps = *work_->steps;
  const int64_t first = steps.range_begin(range), last = steps.range_begin(range + 1);
  uint8_t* keep = work_->keep.data();
  switch (weights_->choice) {
    case Choice::kAll: std::fill(keep + first, keep + last, uint8_t{1}); break;
    case Choice::kScores: multiply_row(1, first / kRows, last / kRows); break;
    case Choice::kSigns: match_signs(first, last);
  }
  steps.run_range(range, keep);
}

void PredictedFfn::collect() {
  if (weights_->masked) {
    work_->kept.count_kept(work_->keep.data(), neurons_, work_->rows.data(), total_, counts_.kept);
    counts_.read = static_cast<int32_t>(work_->kept.count);
    return;
  }
  const SparseSteps& steps = *work_->steps;
  work_->steps->collect(work_->keep.data());
  hidden_items_ = steps.hidden_items(), project_items_ = steps.project_items(), sum_items_ = steps.sum_items();
}

}  // namespace specsparse
