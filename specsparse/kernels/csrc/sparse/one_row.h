// The neurons that a single row keeps, on a few threads.
#pragma once

#include "pool/pool.h"
#include "sparse/sparse_call.h"

namespace specsparse {

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

}  // namespace specsparse
