#define SPECSPARSE_ISA portable
#include "simd/simd_portable.h"
#include "dense/kernels.inl"

namespace specsparse {
const Ops kPortableOps = SPECSPARSE_TABLE("portable", Registers::kPortable, nullptr);
}
