#define SPECSPARSE_ISA avx2
#include "sparse_simd_avx2.h"
#include "sparse.inl"
#include "zero_skip.inl"

namespace specsparse {
const SparseOps kAvx2SparseOps = SPECSPARSE_SPARSE_TABLE;
}
