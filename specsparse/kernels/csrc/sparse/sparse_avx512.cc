#define SPECSPARSE_ISA avx512
#include "sparse/sparse_simd_avx512.h"
#include "sparse/sparse.inl"
#include "sparse/zero_skip.inl"

namespace specsparse {
const SparseOps kAvx512SparseOps = SPECSPARSE_SPARSE_TABLE;
}
