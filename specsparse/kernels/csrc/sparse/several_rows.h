// The neurons that several rows keep between them.
#pragma once

#include "sparse/sparse_call.h"

namespace specsparse {

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
