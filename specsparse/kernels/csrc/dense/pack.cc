// Rows of a GGUF file into groups of sixteen, for floats and for blocks that are scales and codes as the kernels read them.
// docs/layouts.md gives the bytes; kernels/packing/pack.py has the other types, and these where nothing was compiled.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd/ops.h"

namespace specsparse {
namespace {

template <int SIZE>
void turn_floats(const uint8_t* from, int64_t row_bytes, int64_t lanes, uint8_t* to) {
  for (int64_t at = 0; at < row_bytes; at += SIZE, to += kRows * SIZE)
    for (int64_t r = 0; r < lanes; ++r) std::memcpy(to + SIZE * r, from + r * row_bytes + at, SIZE);
}

// Blocks of SCALES halves and WORDS words of four codes or eight.
template <int SCALES, int WORDS>
void turn_blocks(const uint8_t* from, int64_t row_bytes, int64_t lanes, uint8_t* to) {
  constexpr int64_t kBytes = 2 * SCALES + 4 * WORDS;
  for (int64_t at = 0; at < row_bytes; at += kBytes, to += kRows * kBytes) {
    uint8_t* codes = to + 2 * kRows * SCALES;
    for (int64_t r = 0; r < lanes; ++r) {
      const uint8_t* block = from + r * row_bytes + at;
      for (int s = 0; s < SCALES; ++s) std::memcpy(to + 2 * (kRows * s + r), block + 2 * s, 2);
      for (int c = 0; c < WORDS; ++c) std::memcpy(codes + 4 * (kRows * c + r), block + 2 * SCALES + 4 * c, 4);
    }
  }
}

using Turn = void (*)(const uint8_t* from, int64_t row_bytes, int64_t lanes, uint8_t* to);

// By the bytes of a float, or the halves and words of a block; null where numpy packs.
Turn turn_of(int64_t item, int64_t scales, int64_t words) {
  if (item == 2) return turn_floats<2>;
  if (item == 4) return turn_floats<4>;
  if (scales == 1 && words == 4) return turn_blocks<1, 4>;
  if (scales == 2 && words == 4) return turn_blocks<2, 4>;
  if (scales == 1 && words == 8) return turn_blocks<1, 8>;
  return nullptr;
}

}  // namespace
}  // namespace specsparse

// Fills out[ceil(rows / 16)][16 * row_bytes]; false, with nothing written, where there is no such function.
extern "C" __attribute__((visibility("default"))) int specsparse_pack(uint8_t* out, const uint8_t* raw, int64_t rows,
                                                                      int64_t row_bytes, int64_t item, int64_t scales,
                                                                      int64_t words) {
  using namespace specsparse;
  const Turn turn = turn_of(item, scales, words);
  if (!turn) return 0;
  for (int64_t first = 0; first < rows; first += kRows, out += kRows * row_bytes) {
    const int64_t lanes = std::min<int64_t>(kRows, rows - first);
    if (lanes < kRows) std::memset(out, 0, kRows * row_bytes);
    turn(raw + first * row_bytes, row_bytes, lanes, out);
  }
  return 1;
}
