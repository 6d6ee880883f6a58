#define SPECSPARSE_ISA portable
#include "simd_portable.h"
#include "kernels.inl"

namespace specsparse {
const Ops kPortableOps = SPECSPARSE_TABLE("portable");
}
