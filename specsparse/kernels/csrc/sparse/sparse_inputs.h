// What products of kept neurons read beside weights: rows of activations as `Input`s, and the neurons that rows keep.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

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

  // By `keep` [., width] of rows `ids`, of which there are up to kSparseRows; kept[id] is how many the row keeps.
  void collect(const uint8_t* keep, int64_t width, const int32_t* ids, int64_t total, int32_t* kept) {
    make(width);
    count = 0;
    if (total == 1) {
      kept[ids[0]] = static_cast<int32_t>(count = list(keep + ids[0] * width, 0, width, 0));
      std::fill_n(rows.begin(), count, 1);
      return;
    }
    for (int64_t t = 0; t < total; ++t) kept[ids[t]] = 0;
    for (int64_t first = 0; first < width; first += 64) {
      uint64_t words[kSparseRows], any = 0;
      for (int64_t t = 0; t < total; ++t) {
        const uint8_t* from = keep + ids[t] * width + first;
        uint8_t last[64] = {};
        if (first + 64 > width) from = std::copy_n(from, width - first, last) - (width - first);
        any |= words[t] = set_bytes(from);
        kept[ids[t]] += __builtin_popcountll(words[t]);
      }
      for (; any; any &= any - 1, ++count) {
        const int place = __builtin_ctzll(any);
        uint64_t mask = 0;
        for (int64_t t = 0; t < total; ++t) mask |= (words[t] >> place & 1) << t;
        neurons[count] = static_cast<int32_t>(first + place), rows[count] = mask;
      }
    }
  }
};

}  // namespace specsparse
