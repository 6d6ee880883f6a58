#define SPECSPARSE_ISA avx2
#include "simd_avx2.h"
#include "kernels.inl"

namespace specsparse {
const Ops kAvx2Ops = SPECSPARSE_TABLE("avx2");
}
