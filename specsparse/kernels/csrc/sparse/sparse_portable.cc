#define SPECSPARSE_ISA portable
#include "sparse/sparse_simd_portable.h"
#include "sparse/sparse.inl"
#include "sparse/zero_skip.inl"

namespace specsparse {
const SparseOps kPortableSparseOps = SPECSPARSE_SPARSE_TABLE;
}
