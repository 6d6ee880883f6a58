// What the steps of one call of a sparse FFN share, however many rows it has.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "sparse/sparse_inputs.h"

namespace specsparse {

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

}  // namespace specsparse
