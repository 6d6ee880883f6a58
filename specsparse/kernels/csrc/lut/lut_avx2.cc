#define SPECSPARSE_ISA avx2
#include "lut/lut_simd_avx2.h"
#include "lut/lut.inl"

namespace specsparse {
const LutOps kAvx2LutOps = SPECSPARSE_LUT_TABLE;
}
