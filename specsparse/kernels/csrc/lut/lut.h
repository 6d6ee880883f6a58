// Four-bit weights times activations by tables instead of products (T-MAC, Wei et al. 2024, arXiv:2407.00088): an ablation
// beside the products of kernels.inl, which no model runs on. Every table of functions computes the same bits.
//
// One bit of four neighbouring codes of a row is an index into the sixteen sums of their four activations; bit b counts 2^b.
#pragma once

#include <cstdint>

#include "simd/ops.h"

namespace specsparse {

// What a table holds. kExact: sums of int8 activations as they are, in two bytes, so that the result is that of the products.
// Otherwise sums of float activations in steps of the block's largest / 127, or / 31 where bytes are added in fours before
// they are widened.
enum class Sums : int64_t { kExact, kInt8, kInt6 };

constexpr int kQuads = kBlock / 4;          // tables of a block
constexpr int kTableBytes = kQuads * 16;    // of a block, one byte an entry
constexpr int64_t table_stride(Sums kind) { return kind == Sums::kExact ? 2 * kTableBytes : kTableBytes; }

// What turns the sums of a block's codes into numbers: dw * (scale * (sum of entries - less) + centre) + m * shift.
struct LutFactors {
  float scale;
  float centre;  // the bits of rounded tables stand for -1 and 1: what that leaves out
  float shift;   // sum of the activations
  int32_t less;
};

// One row of activations.
struct LutRow {
  uint8_t* tables;      // [blocks][table_stride]; of exact ones the low bytes first, both bytes signed
  LutFactors* factors;  // [blocks]
};

struct LutOps {
  // Fills the tables of `blocks` blocks. q is read by kExact, x by the others; `zero` is the matrix's.
  void (*build)(Sums kind, const float* x, const QBlock* q, int64_t blocks, int32_t zero, const LutRow& to);
  // y[t * 16 + r] = row r of group g times rows[t], 1 <= tokens <= kLutTokens. Scales are kD or kDm.
  void (*dot)(Sums kind, const Matrix& w, int64_t g, const LutRow* rows, int tokens, float* y);
};
constexpr int kLutTokens = 4;

extern const LutOps kPortableLutOps;
#if defined(__x86_64__)
extern const LutOps kAvx2LutOps;
#endif

// The table that goes with ops(); AVX-512 has none of its own and takes AVX2's.
const LutOps& lut_ops();

}  // namespace specsparse
