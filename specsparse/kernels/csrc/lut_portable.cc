#define SPECSPARSE_ISA portable
#include "lut_simd_portable.h"
#include "lut.inl"

namespace specsparse {
const LutOps kPortableLutOps = SPECSPARSE_LUT_TABLE;
}
