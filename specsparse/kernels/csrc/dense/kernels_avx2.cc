#define SPECSPARSE_ISA avx2
#include "simd/simd_avx2.h"
#include "dense/kernels.inl"

namespace specsparse {
const Ops kAvx2Ops = SPECSPARSE_TABLE("avx2", Registers::kAvx2, nullptr);
}
