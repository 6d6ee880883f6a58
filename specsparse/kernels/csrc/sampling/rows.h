// A row of logits and its distribution, with the definitions of engine/sampling/probs.py.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "ffi/bind.h"

namespace specsparse {

constexpr int64_t kSumBlock = 256, kMaxBlock = 64, kUniforms = 4;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// A row's logits padded with -inf, its weights e, and the maxima of its blocks.
struct Row {
  std::vector<float> x, e, maxima, sums, picked;
  int64_t width = 0;

  // Room for the weights of so many logits, 0 beyond them.
  void make_room(int64_t count);
  void load(const float* logits, int64_t count);

  // Calls f(i) for every logit x[i] >= from, passing over blocks that have none.
  template <class F>
  void visit(float from, F f) const {
    for (int64_t b = 0; b < width / kMaxBlock; ++b)
      if (maxima[b] >= from)
        for (int64_t i = b * kMaxBlock; i < (b + 1) * kMaxBlock; ++i)
          if (x[i] >= from) f(i);
  }
};

// Sampling parameters of a row.
struct Shape {
  float temperature, log_min_p, top_p;
  int64_t top_k;
};

// Those of several rows, as operands of a call.
struct Shapes {
  Floats temperature, log_min_p;
  Ints32 top_k;
  Floats top_p;
  int64_t count() const { return temperature.element_count(); }
  Shape of(int64_t r) const {
    return {temperature.typed_data()[r], log_min_p.typed_data()[r], top_p.typed_data()[r], top_k.typed_data()[r]};
  }
};

// The weights of a row's tokens, in row->e, and their mass; or the one token of a greedy row, or of one without any token.
struct Weighed {
  int64_t only = -1;
  float total = 1.0f;
};

Weighed weigh_row(const float* logits, int64_t count, const Shape& shape, float top, Row* into);

// p[i] of each token; false if the logits have no distribution (NaN, +inf or nothing above -inf).
bool probs_row(const float* logits, int64_t count, const Shape& shape, float* p);

// Sum of row->e, in the order of `probs.mass`.
float mass(Row* row);

// The token that the kUniforms numbers u draw, by row->e, none of it below 0 and 0 beyond the vocabulary.
int32_t draw_from(Row* row, const float* u);

}  // namespace specsparse
