// All layers of a forward pass as one job.
#pragma once

#include <vector>

#include "dense/attention.h"
#include "dense/linear.h"
#include "sparse/zero_skip.h"

namespace specsparse {

// Matrices of a layer, in the order in which a call describes them.
enum LayerMatrix { kQ, kK, kV, kO, kGate, kUp, kDown, kMatrices };

struct LayerWeights {
  Description matrices[kMatrices];
  const float *attn_norm, *ffn_norm;
  void *keys, *values;  // the layer's cache
  SkipWeights skip;     // of a ReLU model whose zeros are skipped
};

// Memory between the phases, kept from call to call. Rows are those that the plan says count, in order.
struct Workspace {
  ActivationBuffer activations;
  std::vector<float> x, q, k, v, rotated, attended, hidden;
  AttendPlan plan;
};

// Runs the layers on the rows in `work.x`, in place. Where there are `counts`, one of each layer, the layers have what
// zero skipping reads.
void run_layers(const std::vector<LayerWeights>& layers, Workspace& work, Act act, float eps,
                const std::vector<SkipCounts>& counts);

}  // namespace specsparse
