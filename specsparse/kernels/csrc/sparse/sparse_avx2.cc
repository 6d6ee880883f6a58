#define SPECSPARSE_ISA avx2
#include "sparse/sparse_simd_avx2.h"
#include "sparse/sparse.inl"
#include "sparse/zero_skip.inl"

namespace specsparse {
const SparseOps kAvx2SparseOps = SPECSPARSE_SPARSE_TABLE;
}
