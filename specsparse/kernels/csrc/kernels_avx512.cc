#define SPECSPARSE_ISA avx512
#include "simd_avx512.h"
#include "kernels.inl"

namespace specsparse {
const Ops kAvx512Ops = SPECSPARSE_TABLE("avx512");
}
