// The FFN of a layer with experts: a row of activations goes through the few that were chosen for it.
#pragma once

#include "dense/linear.h"
#include "sparse/zero_skip.h"

namespace specsparse {

// Matrices of the first of `count` experts; those of the others follow each, and so do their biases.
struct ExpertWeights {
  Description gate, up, down;
  int64_t count;
  Act act;
  SkipWeights skip{};  // of ReLU experts whose zeros are skipped; an expert of several rows is read whole
};

// The rows of a pass: y[r] = sum over ranks j, in order, of weights[r][j] * expert chosen[r][j] of x[r]. A choice outside
// [0, count) adds nothing.
struct ExpertRows {
  int64_t rows, ranks;
  const float* x;
  const int32_t* chosen;  // [rows, ranks]
  const float* weights;
  float* y;
};

// Reads each expert that any row chose once. A row has the bits that dense products with its own experts give it.
void run_experts(const ExpertWeights& weights, const ExpertRows& rows);

}  // namespace specsparse
