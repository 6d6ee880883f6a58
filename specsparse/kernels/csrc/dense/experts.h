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

// How scores come from the router's logits: over all experts, of each, or over those that were chosen.
enum class Gating : int64_t { kSoftmax, kSigmoid, kChosen };

// The experts of a row by its logits[count], best first and ties by index, and their weights; both [ranks], with ranks at
// most count. Where `normalised`, weights are divided by their sum or by 2^-14, as in llama.cpp.
void choose_experts(const float* logits, int64_t count, int64_t ranks, Gating gating, bool normalised, int32_t* experts,
                    float* weights);

}  // namespace specsparse
