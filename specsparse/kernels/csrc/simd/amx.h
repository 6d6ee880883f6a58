// Whether this process may use AMX, and its tables.
#pragma once

#include "simd/ops.h"

namespace specsparse {

// null where it may; else one line on why not. Asks the kernel and tries the products, once.
const char* why_no_amx();

#if defined(__x86_64__)
Ops amx_ops();  // kAvx512Ops with products by tiles
#endif

}  // namespace specsparse
