#include "sparse/sparse.h"

namespace specsparse {

const SparseOps& sparse_ops() {
#if defined(__x86_64__)
  if (&ops() == &kAvx512Ops) return kAvx512SparseOps;
  if (&ops() == &kAvx2Ops) return kAvx2SparseOps;
#endif
  return kPortableSparseOps;
}

}  // namespace specsparse
