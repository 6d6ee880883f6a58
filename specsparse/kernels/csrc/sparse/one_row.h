// The neurons that a single row keeps, on a few threads.
#pragma once

#include "sparse/sparse_call.h"

namespace specsparse {

// Items are ranges of whole segments, from the gate to the output, a few neurons at a time. All that a step reads is fetched one
// step before and while something is computed, so that memory is never idle: a gate's rows while the gates before it are
// computed, rows of up and of down, once the gate is open, while those of the step before are.
class OneRow {
 public:
  static constexpr int64_t kMostThreads = 8;  // to which segments are shared out evenly enough

  // `call` has its neurons.
  void begin(SparseCall& call);
  int64_t items() const { return items_; }
  void run(int64_t item);

 private:
  static constexpr int64_t kItemNeurons = 48;      // of an item at least: its first and last steps have less to do meanwhile
  static constexpr int64_t kStep = 8;              // neurons of a step, at most
  static constexpr int64_t kStepBytes = 36 << 10;  // of their rows, at most

  // Neurons on their way: their gates are open, and up and down are to come.
  struct Opened {
    static constexpr int64_t kMost = kStep + kRowGroup;
    int64_t count = 0;
    int32_t neurons[kMost], places[kMost];  // and where they stand in the union
    alignas(64) float gates[kMost + 16];
  };
  // Some of them, whose rows are fetched meanwhile.
  struct Ahead {
    const int32_t* neurons;
    int64_t count, at = 0;
  };

  int64_t end_of(int64_t item) const;
  void open(int64_t first, int64_t count, Opened* to, float* scratch) const;
  void multiply(const Opened& from, int64_t count, const Ahead& next, Added* list, float* scratch) const;
  void add(const Added& list, int64_t first, int64_t count, int64_t segment, Ahead* next, float* scratch) const;

  SparseCall* call_;
  int64_t items_, step_;
  std::vector<int32_t> neurons_;  // those that are not zero, at the place of the segment's first in the union, and what they are
  std::vector<float> values_;     // multiplied with
};

}  // namespace specsparse
