// An FFN without the neurons that are zero: the dense one's bits from fewer bytes. Zeros are those of a ReLU, which the gate
// closes, for one row of activations; or of a mask that a predictor made, for rows that keep few neurons. Otherwise the dense
// kernels are faster.
#pragma once

#include <cstdint>

#include "dense/linear.h"
#include "sparse/sparse_call.h"

namespace specsparse {

// Up and down by neuron, both Q4_0; no data: the layer has none. The gate by neuron too where there is a mask.
struct SkipWeights {
  NeuronRows up{}, gate{};
  NeuronBlocks down;
};

// What a forward pass sees of a layer's neurons; the caller sets all to 0.
struct SkipCounts {
  int32_t* nonzero;  // neurons of each row of activations that are not zero
  int32_t* active;   // neurons that are so in any row
};

// Counts the neurons [begin, end) of `rows` rows of `width`, those that a row does not keep made 0: `keep` is 1 or 0, or null.
void count_neurons(float* hidden, const uint8_t* keep, int64_t width, int64_t rows, int64_t begin, int64_t end,
                   const SkipCounts& counts);

// Hidden neurons from the gate, then the output from the hidden neurons. In between the caller quantises them.
class ZeroSkip {
 public:
  // gate, up: of Q4_0, [F, D]. z: the input, normalised and quantised; hidden: f32[rows, F], h: the same quantised;
  // out: f32[rows, D], residual (or null) + the output. All must outlive this.
  ZeroSkip(const Description* gate, const Description* up, const SkipWeights* weights, const Activations& z, float* hidden,
           const Activations& h, const float* residual, float* out, Act act, const SkipCounts& counts, int64_t rows = 1);

  // With a mask, before anything else: the neurons of the rows, `counts` of each, not listed yet. False if they are so many
  // that the dense kernels are faster.
  bool choose(Union& kept, const int32_t* counts);
  int64_t hidden_items() const { return kept_ ? items_ : (groups_ + step_ - 1) / step_; }
  void hidden(int64_t item) const { kept_ ? hidden_of_kept(item) : hidden_of_open(item); }
  // From here on: whether so few neurons are active that `output` is faster than the dense product.
  bool few() const;
  int64_t output_items() const { return output_items_; }
  void output(int64_t item) const;
  // Fetches the beginning of what an item reads of the gate.
  void prefetch(int64_t bytes, int64_t item) const;

 private:
  void hidden_of_open(int64_t item) const;
  void hidden_of_kept(int64_t item) const;
  int32_t multiply(const int32_t* js, const float* gates, int64_t count, int64_t row, const int32_t* then, int64_t left) const;

  const Description *gate_, *up_;
  const SkipWeights* weights_;
  const Union* kept_ = nullptr;
  Activations z_, h_;
  const float* residual_;
  float *hidden_, *out_;
  int64_t groups_, step_, output_items_, rows_, items_ = 0;
  Act act_;
  SkipCounts counts_;
};

}  // namespace specsparse
