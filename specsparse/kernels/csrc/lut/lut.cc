#include "lut/lut.h"

namespace specsparse {

const LutOps& lut_ops() {
#if defined(__x86_64__)
  if (ops().registers != Registers::kPortable) return kAvx2LutOps;
#endif
  return kPortableLutOps;
}

}  // namespace specsparse
