#define SPECSPARSE_ISA portable
#include "sparse_simd_portable.h"
#include "sparse.inl"
#include "zero_skip.inl"

namespace specsparse {
const SparseOps kPortableSparseOps = SPECSPARSE_SPARSE_TABLE;
}
