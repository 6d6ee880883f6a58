#include "sparse_ffn.h"

#include <algorithm>
#include <cstring>

#include "pool.h"

namespace specsparse {
namespace {

constexpr int64_t kTokens = 64;              // rows that share one reading of the neurons: bits of a mask
constexpr int64_t kItemBytes = 64 << 10;     // gate and up of one item
constexpr int64_t kTileBytes = 128 << 10;    // of a stripe of down that several rows read: half a core's L2
constexpr int64_t kStripeChunks = 8;         // most columns of a stripe of down: 512

// Memory that a calling thread keeps from call to call.
template <class T>
T* reserve(std::vector<T>& v, int64_t count) {
  if (static_cast<int64_t>(v.size()) < count) v.resize(count);
  return v.data();
}

// Rows of activations as `Input`s.
class Inputs {
 public:
  void prepare(const float* x, const SparseFfn& ffn, const int32_t* rows, int64_t count) {
    cols_ = ffn.up.cols, padded_ = ffn.up.chunks() * kChunk, blocks_ = (padded_ / kBlock + 15) / 16 * 16;
    quantise_ = !ffn.up.is_float() || (ffn.gate && !ffn.gate->is_float());
    // prepare() of the dense kernels wants whole blocks: columns are filled up before, not after.
    float* values = reserve(x_, count * padded_);
    QBlock* q = reserve(q_, padded_ / kBlock * count);
    int8_t* codes = reserve(codes_, count * padded_);
    float* scales = reserve(scales_, 6 * count * blocks_);
    reserve(inputs_, count);
    parallel(count, [&](int64_t i) {
      float* to = values + i * padded_;
      const Activations one{cols_, 0, to, nullptr};
      ops().prepare(x + rows[i] * cols_, ffn.norm, ffn.eps, one, 0, false);
      std::fill(to + cols_, to + padded_, 0.0f);
      inputs_[i].x = to;
      if (quantise_) quantise(i, to, q + i * (padded_ / kBlock), codes + i * padded_, scales + 6 * i * blocks_);
    });
    pointers_.clear();
    for (int64_t i = 0; i < count; ++i) pointers_.push_back(&inputs_[i]);
  }

  const Input* operator[](int64_t i) const { return pointers_[i]; }

 private:
  // The dense kernels' blocks, their fields one after the other.
  void quantise(int64_t i, float* x, QBlock* q, int8_t* codes, float* at) {
    const int64_t blocks = padded_ / kBlock;
    thread_local std::vector<float> copy;
    float* same = reserve(copy, padded_);
    ops().prepare(x, nullptr, 0.0f, Activations{padded_, blocks, same, q}, 0, true);
    std::fill(at, at + 6 * blocks_, 0.0f);
    float *one = at, *two = at + blocks_, *sum = at + 3 * blocks_, *sums = at + 4 * blocks_;
    for (int64_t b = 0; b < blocks; ++b) {
      std::memcpy(codes + b * kBlock, q[b].q, kBlock);
      one[b] = two[2 * b] = two[2 * b + 1] = q[b].scale;
      sum[b] = q[b].shift, sums[2 * b] = q[b].shifts[0], sums[2 * b + 1] = q[b].shifts[1];
    }
    inputs_[i].codes = codes;
    inputs_[i].scales[0] = one, inputs_[i].scales[1] = two;
    inputs_[i].sums[0] = sum, inputs_[i].sums[1] = sums;
  }

  int64_t cols_, padded_, blocks_;
  bool quantise_;
  std::vector<float> x_, scales_;
  std::vector<QBlock> q_;
  std::vector<int8_t> codes_;
  std::vector<Input> inputs_;
  std::vector<const Input*> pointers_;
};

// The neurons that any of some rows keeps, ascending, and which of the rows do.
struct Union {
  std::vector<int32_t> neurons;
  std::vector<uint64_t> rows;  // of each neuron
  std::vector<uint64_t> all;   // scratch: by neuron id

  void collect(const uint8_t* keep, int64_t width, const int32_t* ids, int64_t count, int32_t* kept) {
    neurons.clear(), rows.clear();
    if (count == 1) {
      scan(keep + ids[0] * width, width, [&](int64_t j) { neurons.push_back(static_cast<int32_t>(j)); });
      rows.assign(neurons.size(), 1);
      kept[ids[0]] = static_cast<int32_t>(neurons.size());
      return;
    }
    all.assign(width, 0);
    for (int64_t t = 0; t < count; ++t) {
      int32_t found = 0;
      scan(keep + ids[t] * width, width, [&](int64_t j) { all[j] |= 1ull << t, ++found; });
      kept[ids[t]] = found;
    }
    for (int64_t j = 0; j < width; ++j)
      if (all[j]) neurons.push_back(static_cast<int32_t>(j)), rows.push_back(all[j]);
  }

 private:
  // found(j) for every byte that is not zero.
  template <class Found>
  static void scan(const uint8_t* keep, int64_t width, Found found) {
    int64_t j = 0;
    for (; j + 8 <= width; j += 8) {
      uint64_t eight;
      std::memcpy(&eight, keep + j, 8);
      if (!eight) continue;
      for (int64_t i = j; i < j + 8; ++i)
        if (keep[i]) found(i);
    }
    for (; j < width; ++j)
      if (keep[j]) found(j);
  }
};

// The neurons of one item that have something to add to a row, ascending.
struct Tile {
  int64_t count;
  int32_t* neurons;
  float* values;
};

void activate(float* x, int64_t count, Activation act, const float* ones) {
  static_assert(int64_t(Act::kSilu) == Activation::kSilu && int64_t(Act::kRelu2) == Activation::kRelu2);
  if (act.kind == Activation::kFatRelu) {
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] > act.threshold ? x[i] : 0.0f;
  } else if (act.kind != Activation::kNone) {
    ops().glu(x, ones, count, Act(act.kind));
  }
}

// One call: rows of activations, their neurons, and what each item of neurons gives to each row.
class Call {
 public:
  void run(const SparseFfn& ffn, const float* x, const uint8_t* keep, const float* residual, const int32_t* rows,
           int64_t count, float* y, SparseCounts* counts) {
    ffn_ = &ffn, count_ = count;
    union_.collect(keep, ffn.up.rows, rows, count, counts->kept);
    inputs_.prepare(x, ffn, rows, count);
    const int64_t total = union_.neurons.size();
    const int64_t bytes = ffn.up.row_bytes + (ffn.gate ? ffn.gate->row_bytes : 0);
    const int64_t even = std::max<int64_t>(1, total / (8 * threads()));
    per_item_ = std::clamp<int64_t>(kItemBytes / bytes, 1, std::min<int64_t>(even, 64));
    items_ = (total + per_item_ - 1) / per_item_;
    reserve_tiles();
    parallel(items_, [&](int64_t item) { hidden(item); });
    for (int64_t t = 0; t < count; ++t) {
      int64_t found = 0;
      for (int64_t i = 0; i < items_; ++i) found += tiles_[i * count + t].count;
      counts->nonzero[rows[t]] = static_cast<int32_t>(found);
    }
    const int64_t chunks = ffn.down.chunks(), stripe = stripe_chunks();
    parallel((chunks + stripe - 1) / stripe, [&](int64_t item) {
      project(item * stripe, std::min(chunks, (item + 1) * stripe), residual, rows, y);
    });
  }

  const std::vector<int32_t>& neurons() const { return union_.neurons; }

 private:
  void reserve_tiles() {
    const int64_t slots = items_ * count_ * per_item_;
    int32_t* ids = reserve(tile_neurons_, slots);
    float* values = reserve(tile_values_, slots);
    Tile* tiles = reserve(tiles_, items_ * count_);
    for (int64_t i = 0; i < items_ * count_; ++i) tiles[i] = {0, ids + i * per_item_, values + i * per_item_};
  }

  // Gate, up and activation of one item's neurons, each for the rows that keep it.
  void hidden(int64_t item) {
    const int64_t first = item * per_item_, last = std::min<int64_t>(union_.neurons.size(), first + per_item_);
    thread_local std::vector<float> memory;
    const int64_t pairs = per_item_ * count_ + 16;
    float* up = reserve(memory, 3 * pairs + scratch_floats(ffn_->up));
    float *gate = up + pairs, *ones = gate + pairs, *scratch = ones + pairs;
    int64_t found = 0;
    for (int64_t i = first; i < last; ++i) found += products(i, last, gate + found, up + found, scratch);
    const int64_t padded = (found + 15) / 16 * 16;
    std::fill(ones, ones + padded, 1.0f);
    std::fill(up + found, up + padded, 0.0f), std::fill(gate + found, gate + padded, 0.0f);
    float* a = up;
    if (ffn_->gate) {
      activate(gate, padded, ffn_->act, ones);
      activate(up, padded, ffn_->up_act, ones);
      for (int64_t i = 0; i < found; ++i) gate[i] *= up[i];
      a = gate;
    } else {
      activate(up, padded, ffn_->act, ones);
    }
    Tile* tiles = tiles_.data() + item * count_;
    for (int64_t i = first; i < last; ++i)
      for (uint64_t left = union_.rows[i]; left; left &= left - 1, ++a) {
        if (*a == 0) continue;
        Tile& tile = tiles[__builtin_ctzll(left)];
        tile.neurons[tile.count] = union_.neurons[i], tile.values[tile.count++] = *a;
      }
  }

  // Neuron i of the union times the rows that keep it; how many they are.
  int64_t products(int64_t i, int64_t last, float* gate, float* up, float* scratch) {
    const SparseOps& op = sparse_ops();
    const int64_t j = union_.neurons[i], next = i + 1 < last ? union_.neurons[i + 1] : j;
    int64_t done = 0;
    for (uint64_t left = union_.rows[i]; left;) {
      const Input* inputs[kRowTokens];
      int count = 0;
      for (; left && count < kRowTokens; left &= left - 1) inputs[count++] = inputs_[__builtin_ctzll(left)];
      if (ffn_->gate) op.dot(*ffn_->gate, j, ffn_->gate->row(next), inputs, count, gate + done, scratch);
      op.dot(ffn_->up, j, ffn_->up.row(next), inputs, count, up + done, scratch);
      done += count;
    }
    return done;
  }

  // Few enough stripes for long runs of each row, enough for balance; whole super-blocks where the scales are theirs.
  int64_t stripe_chunks() const {
    const bool super = ffn_->down.scales == Scales::kSuper || ffn_->down.scales == Scales::kSuperMin;
    const int64_t unit = super ? kSuper / kChunk : 1, even = ffn_->down.chunks() / (4 * threads());
    return std::max(unit, std::clamp<int64_t>(even, 1, kStripeChunks) / unit * unit);
  }

  // Columns of chunks [begin, end) of y, for all rows. Several rows take the neurons tile by tile, so that the second
  // finds them in the cache.
  void project(int64_t begin, int64_t end, const float* residual, const int32_t* rows, float* y) {
    const NeuronRows& down = ffn_->down;
    const int64_t size = (end - begin) * kChunk, bytes = (end - begin) * down.code_bytes();
    const int64_t step = count_ == 1 ? items_ : std::max<int64_t>(1, kTileBytes / (bytes * per_item_));
    thread_local std::vector<float> memory;
    thread_local std::vector<int32_t> list;
    const int64_t most = std::min(items_, step) * per_item_;
    float* sums = reserve(memory, count_ * size + most + scratch_floats(down));
    float *values = sums + count_ * size, *scratch = values + most;
    int32_t* neurons = reserve(list, most);
    std::fill(sums, sums + count_ * size, 0.0f);
    for (int64_t i = 0; i < items_; i += step)
      for (int64_t t = 0; t < count_; ++t) {
        int64_t found = 0;
        for (int64_t item = i; item < std::min(items_, i + step); ++item) {
          const Tile& tile = tiles_[item * count_ + t];
          std::copy_n(tile.neurons, tile.count, neurons + found);
          std::copy_n(tile.values, tile.count, values + found);
          found += tile.count;
        }
        sparse_ops().add(down, neurons, values, found, begin, end, sums + t * size, scratch);
      }
    const int64_t first = begin * kChunk, width = std::min(size, down.cols - first);
    for (int64_t t = 0; t < count_; ++t) {
      const int64_t at = rows[t] * down.cols + first;
      for (int64_t c = 0; c < width; ++c) {
        const float sum = sums[t * size + lane_of(down, c)];
        y[at + c] = residual ? residual[at + c] + sum : sum;
      }
    }
  }

  const SparseFfn* ffn_;
  int64_t count_, per_item_, items_;
  Inputs inputs_;
  Union union_;
  std::vector<Tile> tiles_;
  std::vector<int32_t> tile_neurons_;
  std::vector<float> tile_values_;
};

}  // namespace

void sparse_ffn(const SparseFfn& ffn, const float* x, const uint8_t* keep, const float* residual,
                const std::vector<int32_t>& rows, float* y, SparseCounts* counts) {
  thread_local Call call;
  thread_local std::vector<uint8_t> seen;
  const int64_t total = rows.size();
  if (total > kTokens) seen.assign(ffn.up.rows, 0);
  for (int64_t first = 0; first < total; first += kTokens) {
    call.run(ffn, x, keep, residual, rows.data() + first, std::min(kTokens, total - first), y, counts);
    if (total <= kTokens) {
      counts->read = static_cast<int32_t>(call.neurons().size());
    } else {
      for (int32_t j : call.neurons()) counts->read += !seen[j], seen[j] = 1;
    }
  }
}

}  // namespace specsparse
