#define SPECSPARSE_ISA amx
#include "dense/dot_amx.inl"
#include "simd/amx.h"

namespace specsparse {

Ops amx_ops() {
  Ops table = kAvx512Ops;
  table.name = "amx", table.tile = kMostRows, table.leave = Shapes<ProcessorTiles>::release;
  table.dot = [](const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
    dot<ProcessorTiles>(w, g, x, row, tokens, y, kAvx512Ops.dot);
  };
  table.dot_groups = [](const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y) {
    return tokens < kFewest && kAvx512Ops.dot_groups(w, g, x, row, tokens, y);
  };
  return table;
}

}  // namespace specsparse
