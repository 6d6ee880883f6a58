// What the steps of one call of a sparse FFN share: rows of activations, the neurons that rows keep, and the two ways to compute
// them, for a single row on a few threads and for several rows.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "pool/pool.h"
#include "sparse/sparse_ffn.h"

namespace specsparse {
// Begins with a cache line, so that no vector of 64 bytes lies in two.
template <class T>
struct WholeLines {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  WholeLines() = default;
  template <class U>
  WholeLines(const WholeLines<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
  template <class U>
  bool operator==(const WholeLines<U>&) const {
    return true;
  }
  template <class U>
  bool operator!=(const WholeLines<U>&) const {
    return false;
  }
};
template <class T>
using Lines = std::vector<T, WholeLines<T>>;

// Memory that a calling thread keeps from call to call.
template <class T, class A>
T* reserve(std::vector<T, A>& v, int64_t count) {
  if (static_cast<int64_t>(v.size()) < count) v.resize(count);
  return v.data();
}

// Rows of activations as `Input`s.
class Inputs {
 public:
  // Room for `count` rows.
  void make(const SparseFfn& ffn, int64_t count) {
    cols_ = ffn.up.cols, padded_ = ffn.up.chunks() * kChunk, blocks_ = (padded_ / kBlock + 15) / 16 * 16;
    quantise_ = !ffn.up.is_float() || (ffn.gate && !ffn.gate->is_float());
    // prepare() of the dense kernels wants whole blocks: columns are filled up before, not after.
    reserve(x_, count * padded_), reserve(q_, padded_ / kBlock * count), reserve(chunks_, count * padded_ / kChunk);
    reserve(scales_, 6 * count * blocks_), reserve(inputs_, count);
    pointers_.clear();
    for (int64_t i = 0; i < count; ++i) pointers_.push_back(&inputs_[i]);
  }

  // Row i.
  void prepare(const float* x, const SparseFfn& ffn, int64_t i) {
    float* to = x_.data() + i * padded_;
    const Activations one{cols_, 0, to, nullptr};
    ops().prepare(x, ffn.norm, ffn.eps, one, 0, false);
    std::fill(to + cols_, to + padded_, 0.0f);
    inputs_[i].x = to;
    if (quantise_)
      quantise(i, to, q_.data() + i * (padded_ / kBlock), chunks_.data() + i * (padded_ / kChunk), scales_.data() + 6 * i * blocks_);
  }

  const Input* operator[](int64_t i) const { return pointers_[i]; }

 private:
  // The dense kernels' blocks, their fields one after the other.
  void quantise(int64_t i, float* x, QBlock* q, InputChunk* chunks, float* at) {
    const int64_t blocks = padded_ / kBlock;
    thread_local Lines<float> copy;
    float* same = reserve(copy, padded_);
    ops().prepare(x, nullptr, 0.0f, Activations{padded_, blocks, same, q}, 0, true);
    std::fill(at, at + 6 * blocks_, 0.0f);
    float *one = at, *two = at + blocks_, *sum = at + 3 * blocks_, *sums = at + 4 * blocks_;
    for (int64_t b = 0; b < blocks; ++b) {
      std::memcpy(chunks[b / 2].codes + b % 2 * kBlock, q[b].q, kBlock);
      one[b] = two[2 * b] = two[2 * b + 1] = q[b].scale;
      sum[b] = q[b].shift, sums[2 * b] = q[b].shifts[0], sums[2 * b + 1] = q[b].shifts[1];
    }
    for (int64_t c = 0; c < padded_ / kChunk; ++c)
      for (int64_t k = 0; k < kChunk; k += 4) {
        const int8_t* codes = chunks[c].codes + k;
        chunks[c].lows[k / 4] = -kNibbleZero * (codes[0] + codes[1] + codes[2] + codes[3]);
      }
    inputs_[i].chunks = chunks;
    inputs_[i].scales[0] = one, inputs_[i].scales[1] = two;
    inputs_[i].sums[0] = sum, inputs_[i].sums[1] = sums;
  }

  int64_t cols_, padded_, blocks_;
  bool quantise_;
  Lines<float> x_, scales_;
  std::vector<QBlock> q_;
  std::vector<InputChunk> chunks_;
  std::vector<Input> inputs_;
  std::vector<const Input*> pointers_;
};

// Bit k is set where byte k of eight is not 0.
inline uint64_t set_bytes_of_eight(const uint8_t* bytes) {
  constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7f, kGather = 0x0102040810204080;
  uint64_t v;
  std::memcpy(&v, bytes, 8);
  v = (((v & kLow) + kLow) | v) & ~kLow;  // the highest bit of each byte that is not 0
  return (v >> 7) * kGather >> 56;
}

// The same of 64.
inline uint64_t set_bytes(const uint8_t* bytes) {
  uint64_t found = 0;
  for (int i = 0; i < 8; ++i) found |= set_bytes_of_eight(bytes + 8 * i) << (8 * i);
  return found;
}

// Which bits of a byte are set, ascending.
struct Places {
  uint8_t of[256][8] = {};
  constexpr Places() {
    for (int byte = 0; byte < 256; ++byte)
      for (int bit = 0, found = 0; bit < 8; ++bit)
        if (byte >> bit & 1) of[byte][found++] = static_cast<uint8_t>(bit);
  }
};
inline constexpr Places kPlaces;

// The neurons that any of some rows keeps, ascending, and which of the rows do.
struct Union {
  int64_t count = 0;
  std::vector<int32_t> neurons;
  std::vector<uint64_t> rows;  // of each neuron

  void make(int64_t width) { reserve(neurons, width), reserve(rows, width); }

  // Lists neurons [first, last) that a single row keeps, from `at` <= first on, and says how many there are. Without a branch:
  // which neurons are kept cannot be guessed.
  int64_t list(const uint8_t* keep, int64_t first, int64_t last, int64_t at) {
    int32_t* to = neurons.data() + at;
    int64_t j = first;
    for (; j + 8 <= last; j += 8) {
      const uint64_t set = set_bytes_of_eight(keep + j);
      const uint8_t* places = kPlaces.of[set];
      for (int k = 0; k < 8; ++k) to[k] = static_cast<int32_t>(j) + places[k];
      to += __builtin_popcountll(set);
    }
    for (; j < last; ++j) *to = static_cast<int32_t>(j), to += keep[j] != 0;
    return to - neurons.data() - at;
  }

  // By `keep` [., width] of rows `ids`, of which there are up to kSparseRows; kept[id] is how many the row keeps. The list of
  // neurons is left to `list_kept`, if it is wanted.
  void count_kept(const uint8_t* keep, int64_t width, const int32_t* ids, int64_t total, int32_t* kept) {
    make(width);
    total_ = total, width_ = width, count = 0;
    if (total == 1) {
      kept[ids[0]] = static_cast<int32_t>(count = list(keep + ids[0] * width, 0, width, 0));
      std::fill_n(rows.begin(), count, 1);
      return;
    }
    for (int64_t t = 0; t < total; ++t) kept[ids[t]] = 0;
    uint64_t* to = reserve(words_, (width + 63) / 64 * total);
    for (int64_t first = 0; first < width; first += 64, to += total) {
      uint64_t any = 0;
      for (int64_t t = 0; t < total; ++t) {
        const uint8_t* from = keep + ids[t] * width + first;
        uint8_t last[64] = {};
        if (first + 64 > width) from = std::copy_n(from, width - first, last) - (width - first);
        any |= to[t] = set_bytes(from);
        kept[ids[t]] += __builtin_popcountll(to[t]);
      }
      count += __builtin_popcountll(any);
    }
  }

  void list_kept() {
    if (total_ == 1) return;
    const uint64_t* from = words_.data();
    int64_t at = 0;
    for (int64_t first = 0; first < width_; first += 64, from += total_) {
      uint64_t any = 0;
      for (int64_t t = 0; t < total_; ++t) any |= from[t];
      for (; any; any &= any - 1, ++at) {
        const int place = __builtin_ctzll(any);
        uint64_t mask = 0;
        for (int64_t t = 0; t < total_; ++t) mask |= (from[t] >> place & 1) << t;
        neurons[at] = static_cast<int32_t>(first + place), rows[at] = mask;
      }
    }
  }

 private:
  int64_t total_ = 0, width_ = 0;
  std::vector<uint64_t> words_;  // by 64 neurons, then row: which the row keeps
};

// Neurons that have something to add to a row, ascending, and what they are multiplied with.
struct Added {
  int64_t count;
  int32_t* neurons;
  float* values;
};

struct SparseCall {
  static constexpr int64_t kSegments = SparseSteps::kSegments;

  const SparseFfn* ffn;
  const int32_t* rows;
  int64_t count;  // of them
  Inputs inputs;
  Union kept;
  std::vector<uint8_t> active;  // by neuron of the union: whether it is not zero in some row
  std::vector<int32_t> added;   // by segment, then row: neurons
  Lines<float> parts;           // by segment, then row: their sums

  int64_t read() const { return kept.count; }
  // What decides over a neuron, and whether it can leave one out.
  const NeuronRows& decides() const { return ffn->gate ? *ffn->gate : ffn->up; }
  bool closes() const { return ffn->least > 0 || (ffn->act.kind != Activation::kSilu && ffn->act.kind != Activation::kNone); }
  bool open(float gate) const { return (gate != 0) & !(std::abs(gate) < ffn->least); }

  int64_t width() const { return (ffn->down.chunks() + 1) / 2 * 2 * kChunk; }  // of a part: whole pairs of chunks
  float* part(int64_t segment, int64_t t) { return parts.data() + (segment * count + t) * width(); }
  int64_t bound(int64_t segment) const { return segment * ffn->down.rows / kSegments; }
  // The first of the union's neurons that belongs to a segment, or to a later one.
  int64_t begin_of(int64_t segment) const {
    const int32_t* js = kept.neurons.data();
    return std::lower_bound(js, js + kept.count, bound(segment)) - js;
  }
  int64_t most_scratch() const {
    return std::max({scratch_floats(ffn->up), scratch_floats(ffn->down), ffn->gate ? scratch_floats(*ffn->gate) : 0});
  }
};

// x = act(x), in place. Room for whole vectors of sixteen is there after x. A NaN stays one, or a closed gate would hide it.
inline void activate(float* x, int64_t count, Activation act) {
  static_assert(int64_t(Act::kSilu) == Activation::kSilu && int64_t(Act::kRelu2) == Activation::kRelu2);
  if (act.kind == Activation::kFatRelu) {
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] > act.threshold ? x[i] : 0.0f;
  } else if (act.kind == Activation::kRelu || act.kind == Activation::kRelu2) {
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] < 0 ? 0.0f : x[i];
    if (act.kind == Activation::kRelu2)
      for (int64_t i = 0; i < count; ++i) x[i] *= x[i];
  } else if (act.kind == Activation::kSilu) {
    alignas(64) static constexpr auto kOnes = [] {
      std::array<float, 256> ones{};
      for (float& one : ones) one = 1.0f;
      return ones;
    }();
    const int64_t whole = (count + 15) / 16 * 16;
    std::fill(x + count, x + whole, 0.0f);
    for (int64_t i = 0; i < whole; i += kOnes.size()) ops().glu(x + i, kOnes.data(), std::min<int64_t>(whole - i, kOnes.size()), Act::kSilu);
  }
}

// The neurons that a single row keeps, on a few threads.
//
// Items are ranges of whole segments, from the gate to the output: all gates, then up of those that are open, then down. Each of
// the three goes through its rows at an even pace, some of them being fetched while as many before are multiplied; the last
// fetch the first of the matrix that follows.
class OneRow {
 public:
  static constexpr int64_t kMostThreads = 8;  // to which segments are shared out evenly enough

  // `call` has its neurons, or will have about `expected` of them.
  void begin(SparseCall& call, int64_t expected);
  int64_t items() const { return items_; }
  // The first segment of an item.
  int64_t segment(int64_t item) const { return share_begin(SparseCall::kSegments, item, items_); }
  void run(int64_t item) { run(item, call_->begin_of(segment(item)), call_->begin_of(segment(item + 1))); }
  // The same, of neurons [first, last) of the union.
  void run(int64_t item, int64_t first, int64_t last);

 private:
  static constexpr int64_t kItemNeurons = 48;       // of an item at least: its first and last rows have nothing beside them
  static constexpr int64_t kAhead = 8;              // rows that are on their way, at most
  static constexpr int64_t kAheadBytes = 36 << 10;  // of them, at most
  static constexpr int64_t kBatch = 16;             // products whose activations are taken together

  // Neurons whose gates are open: which, where they stand in the union, and their gates.
  struct Opened {
    int64_t count;
    int32_t *neurons, *places;
    float* gates;
  };

  void open(int64_t first, int64_t last, Opened* to, float* products, float* scratch) const;
  void multiply(const Opened& from, Added* list, float* products, float* scratch) const;
  void add(const Added& list, int64_t segment, float* scratch) const;

  SparseCall* call_;
  int64_t items_, ahead_;
};

// The neurons that several rows keep between them.
//
// Gate and up by items of neurons, for the rows that keep them; then what each row's neurons add as one list, row by row; then
// down by segments.
class SeveralRows {
 public:
  // `call` has its neurons.
  void begin(SparseCall& call);
  int64_t items() const { return items_; }
  void hidden(int64_t item);
  void join(int64_t t);
  void project(int64_t segment);

 private:
  static constexpr int64_t kLeastNeurons = 32, kItemNeurons = 64;  // of one item
  static constexpr int64_t kTileBytes = 256 << 10;  // of down rows that the rows of activations read in turn: half a core's L2
  static constexpr int64_t kSumBytes = 128 << 10;   // of the sums that they are added to
  static constexpr int64_t kAheadBytes = 8 << 10;   // of the rows that are fetched ahead of a product

  // Neurons to be fetched, of which `at` were.
  struct Ahead {
    const int32_t* neurons;
    int64_t count, at = 0;
  };

  int64_t products(const NeuronRows& w, int64_t first, int64_t last, const uint64_t* masks, float* out, float* scratch,
                   const NeuronRows& next, Ahead ahead) const;
  int64_t products_by_neuron(const NeuronRows& w, int64_t first, int64_t last, const uint64_t* masks, float* out,
                             float* scratch) const;
  const int32_t* shared_ahead(const Added& list, int64_t some, int64_t stop, int64_t t, int64_t begin, int64_t step,
                              bool first) const;

  SparseCall* call_;
  int64_t per_item_, items_;
  std::vector<Added> tiles_;  // by item, then row
  std::vector<Added> lists_;  // by row: its tiles one after the other
  std::vector<int32_t> neurons_;
  std::vector<float> values_;
};

}  // namespace specsparse
