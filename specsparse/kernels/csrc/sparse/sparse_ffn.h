// An FFN that computes the kept neurons of each row only.
#pragma once

#include <cstdint>
#include <memory>
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

constexpr int64_t kSparseRows = 64;  // rows that share one reading of the neurons: bits of a mask

// The work of one call on up to kSparseRows rows, step by step, so that the calls of several layers can be phases of one job.
// A step's items are independent; a step begins when the one before it is done. Memory is kept from call to call.
class SparseSteps {
 public:
  virtual ~SparseSteps() = default;
  // First, by one thread: the rows of the call. All must outlive it.
  virtual void begin(const SparseFfn& ffn, const int32_t* rows, int64_t count, SparseCounts* counts) = 0;
  // Then row by row: row rows[i] of x, normalised and quantised.
  virtual void prepare(const float* x, int64_t i) = 0;
  // And by one thread, before or after: which neurons rows `rows` of keep need together.
  virtual void collect(const uint8_t* keep) = 0;
  // Or, for a single row on a few threads, range by range, in place of all up to `join`: how many ranges there are, of whole
  // segments.
  static bool takes_ranges();
  virtual int64_t begin_ranges() = 0;
  virtual int64_t range_begin(int64_t range) const = 0;  // its first neuron; that of the last range's successor is the end
  virtual void run_range(int64_t range, const uint8_t* keep) = 0;
  // Then the neurons, by items of them.
  virtual int64_t hidden_items() const = 0;
  virtual void hidden(int64_t item) = 0;
  // Then row by row: what the items gave, as one list.
  virtual void join(int64_t i) = 0;
  // Neurons that any row keeps, and those that are not zero in any; known from here on.
  virtual int32_t read() const = 0;
  virtual int32_t active() const = 0;
  // Then the down projection by ranges of neurons, unless the neurons' items did it, and the sums over ranges by row and columns.
  static constexpr int64_t kSegments = 16;  // by neuron's number: the sum of a row is a sum of sums. Part of the definition
  virtual int64_t project_items() const = 0;
  virtual void project(int64_t segment) = 0;
  virtual int64_t sum_items() const = 0;
  virtual void sum(int64_t item, const float* residual, float* y) = 0;
};

std::unique_ptr<SparseSteps> sparse_steps();

// y = (residual or 0) + sum over kept neurons j, ascending, of act(gate_j z) * up_act(up_j z) * down_j, z = x normalised,
// for rows `rows` of x, keep, residual and y; other rows are not touched. The sum is taken over sixteen ranges of neurons of
// equal length, whose sums are then added in order. A row's bits depend on nothing but the row.
void sparse_ffn(const SparseFfn& ffn, const float* x, const uint8_t* keep, const float* residual,
                const std::vector<int32_t>& rows, float* y, SparseCounts* counts);

}  // namespace specsparse
