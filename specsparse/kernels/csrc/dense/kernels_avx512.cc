#define SPECSPARSE_ISA avx512
#include "simd/simd_avx512.h"
#define SPECSPARSE_QUANTISES_ROWS
#include "dense/quantise_avx512.h"
#include "dense/kernels.inl"

namespace specsparse {
const Ops kAvx512Ops = SPECSPARSE_TABLE("avx512", Registers::kAvx512, dot_groups_avx512);
}
