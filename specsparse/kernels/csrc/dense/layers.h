// All layers of a forward pass as one job.
#pragma once

#include <vector>

#include "dense/attention.h"
#include "dense/linear.h"
#include "sparse/predicted.h"
#include "sparse/zero_skip.h"

namespace specsparse {

// Matrices of a layer, in the order in which a call describes them; the last two are a predictor's.
enum LayerMatrix { kQ, kK, kV, kO, kGate, kUp, kDown, kFirst, kSecond, kMatrices };

struct LayerWeights {
  Description matrices[kMatrices];
  const float *attn_norm, *ffn_norm;
  const float *post_attention, *post_ffn;  // norms of what attention and FFN add, or null
  AttendKind kind;
  void *keys, *values;  // the layer's cache
  float* mass = nullptr;  // as `Attention` has it, or null
  SkipWeights skip;     // of a ReLU model whose zeros are skipped, or of predicted neurons that mask the dense FFN
  PredictedWeights predicted;
};

// Memory between the phases, kept from call to call. Rows are those that the plan says count, in order.
struct Workspace {
  ActivationBuffer activations;
  std::vector<float> x, q, k, v, rotated, attended, hidden, added;
  PredictedWork predicted;
  AttendPlan plan;
};

// Where the rows that enter some of the layers are kept: side by side, in the order of `layers`. A layer's number is its
// place in the call; that after the last is the result. Row i is the i-th that counts. Without `layers` nothing is kept.
struct Features {
  float* data = nullptr;       // [., layers.size() * width]
  const int32_t* rows = nullptr;  // row i of `work.x` goes to row rows[i]
  int64_t width = 0;
  std::vector<int64_t> layers;

  // Keeps rows first to last of `x`, which enter layer `layer`.
  void keep(int64_t layer, const float* x, int64_t first, int64_t last) const;
};

// Runs the layers on the rows in `work.x`, in place. If there are `counts`, one of each layer, the layers have what zero skipping
// reads; if there are `predicted`, what predictors and sparse FFNs read, and at most kSparseRows rows. With both, neurons that a
// predictor does not choose are zero in the dense FFN.
void run_layers(const std::vector<LayerWeights>& layers, Workspace& work, Act act, float eps,
                const std::vector<SkipCounts>& counts, std::vector<SparseCounts>* predicted, const Features& features);

}  // namespace specsparse
