// The kinds of blocks that GGUF types are packed into. Kernels are compiled for these and no others.
#pragma once

#include <cstdint>

#include "simd/ops.h"
#include "simd/unroll.h"

namespace specsparse {

// How the codes of a block are read: as they are, by a table of sixteen, or as signed bytes.
enum class Read { kCodes, kTable, kInt8 };

// docs/layouts.md gives the bytes of a block and of the header of a super-block.
template <Read READ, Scales SCALES, int SUBS>
struct BlockKind {
  static constexpr Read kRead = READ;
  static constexpr Scales kScales = SCALES;
  static constexpr int kSubs = SUBS;  // sub-blocks of a block
  static constexpr bool kHalves = SCALES == Scales::kD || SCALES == Scales::kDm;
  static constexpr bool kMins = SCALES == Scales::kDm || SCALES == Scales::kSuperMin;
  static constexpr bool kHeader = SCALES == Scales::kSuper || SCALES == Scales::kSuperMin;
  static constexpr int kHeaderBytes = kHeader ? kMins ? 64 : 32 : 0;
  static constexpr int kScaleBytes = SCALES == Scales::kF32 || SCALES == Scales::kDm ? 64 : kHalves ? 32 : 16;  // of a sub-block
  static constexpr int kCodesAt = SUBS * (kScaleBytes + (SCALES == Scales::kSuperMin ? 16 : 0));
  static constexpr int kBytes = kCodesAt + kRows * kBlock / (READ == Read::kInt8 ? 1 : 2);
  static constexpr int kLines = (kBytes + 63) / 64;
};

constexpr SPECSPARSE_INLINE int64_t kind_number(Read read, Scales scales, int64_t subs) {
  return (static_cast<int64_t>(read) * 8 + static_cast<int64_t>(scales)) * 4 + subs;
}

#define SPECSPARSE_KINDS(X)                                                      \
  X(kCodes, kD, 1)        /* Q4_0 */                                             \
  X(kCodes, kDm, 1)       /* Q4_1 */                                             \
  X(kCodes, kSuperMin, 1) /* Q4_K */                                             \
  X(kTable, kD, 1)        /* IQ4_NL */                                           \
  X(kTable, kSuper, 1)    /* IQ4_XS */                                           \
  X(kTable, kF32, 1)      /* MXFP4 */                                            \
  X(kInt8, kD, 1)         /* Q8_0, Q5_0, TQ1_0, TQ2_0 */                         \
  X(kInt8, kDm, 1)        /* Q5_1 */                                             \
  X(kInt8, kSuperMin, 1)  /* Q5_K */                                             \
  X(kInt8, kF32, 1)       /* IQ1_S, IQ2_XXS, IQ3_XXS, IQ3_S */                   \
  X(kInt8, kSuper, 2)     /* Q3_K, Q6_K */                                       \
  X(kInt8, kSuperMin, 2)  /* Q2_K */                                             \
  X(kInt8, kF32, 2)       /* IQ1_M, IQ2_XS, IQ2_S, NVFP4 */

// f(BlockKind<..>{}) of a matrix's kind, where f is [&](auto kind) SPECSPARSE_EACH { ... }; false where there is none.
template <class M, class F>
SPECSPARSE_INLINE bool with_kind(const M& w, F&& f) {
  const Read read = w.codes == Codes::kInt8 ? Read::kInt8 : w.lut ? Read::kTable : Read::kCodes;
  switch (w.codes > Codes::kInt8 ? -1 : kind_number(read, w.scales, kBlock / w.sub)) {
#define SPECSPARSE_KIND(READ, SCALES, SUBS)               \
  case kind_number(Read::READ, Scales::SCALES, SUBS):     \
    f(BlockKind<Read::READ, Scales::SCALES, SUBS>{});     \
    return true;
    SPECSPARSE_KINDS(SPECSPARSE_KIND)
#undef SPECSPARSE_KIND
  }
  return false;
}

// Whether there are kernels for a matrix as it is described.
template <class M>
SPECSPARSE_INLINE bool has_kernels(const M& w) {
  if (w.is_float()) return w.scales == Scales::kNone;
  return w.sub > 0 && w.cols % kBlock == 0 && with_kind(w, [](auto) SPECSPARSE_EACH {});
}

}  // namespace specsparse
