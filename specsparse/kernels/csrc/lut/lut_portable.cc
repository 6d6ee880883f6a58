#define SPECSPARSE_ISA portable
#include "lut/lut_simd_portable.h"
#include "lut/lut.inl"

namespace specsparse {
const LutOps kPortableLutOps = SPECSPARSE_LUT_TABLE;
}
