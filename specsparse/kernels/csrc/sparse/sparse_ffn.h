// An FFN that computes the kept neurons of each row only.
#pragma once

#include <cstdint>
#include <vector>

#include "sparse/sparse.h"

namespace specsparse {

// What is done to a product; kFatRelu is x where x > threshold, else 0.
struct Activation {
  enum Kind : int64_t { kNone, kSilu, kRelu, kRelu2, kFatRelu } kind;
  float threshold;
};

struct SparseFfn {
  const NeuronRows* gate;  // or null
  NeuronRows up, down;
  const float* norm;  // or null
  float eps;
  Activation act, up_act;
  float least;  // neurons with |act(gate)| below it are left out
};

struct SparseCounts {
  int32_t* kept;     // of each row
  int32_t* nonzero;  // of each row
  int32_t read = 0;    // neurons kept by any row
  int32_t active = 0;  // neurons not zero in any row
};

// y = (residual or 0) + sum over kept neurons j, ascending, of act(gate_j z) * up_act(up_j z) * down_j, z = x normalised,
// for rows `rows` of x, keep, residual and y; other rows are not touched. The sum is taken over sixteen ranges of neurons of
// equal length, whose sums are then added in order. A row's bits depend on nothing but the row.
void sparse_ffn(const SparseFfn& ffn, const float* x, const uint8_t* keep, const float* residual,
                const std::vector<int32_t>& rows, float* y, SparseCounts* counts);

}  // namespace specsparse
