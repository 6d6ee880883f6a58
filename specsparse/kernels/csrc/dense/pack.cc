// Rows of a GGUF file into groups of sixteen, for floats, for blocks that are scales and codes as the kernels read them, and for
// Q4_K, Q5_K and Q6_K.
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

// Four codes.
uint32_t word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

constexpr uint32_t bytes_of(uint32_t mask) { return mask * 0x01010101u; }

// A super-block of a file: scales and mins of blocks or halves of blocks, and the codes of a block.
struct Q4K {
  static constexpr int kBytes = 144, kSubs = 1, kWords = 4;
  static constexpr bool kMins = true;
  static const uint8_t* half(const uint8_t* p, int which) { return p + 2 * which; }
  // Six bits each; the upper two of the last four lie over the first four.
  static uint8_t scale(const uint8_t* p, int b) {
    const uint8_t* s = p + 4;
    return b < 4 ? s[b] & 63 : (s[4 + b] & 15) | ((s[b - 4] >> 2) & 48);
  }
  static uint8_t min(const uint8_t* p, int b) {
    const uint8_t* s = p + 4;
    return b < 4 ? s[4 + b] & 63 : (s[4 + b] >> 4) | ((s[b] >> 2) & 48);
  }
  // Byte j of a run of 32 holds columns j of two blocks; columns j and 16 + j of one are wanted.
  static uint32_t codes(const uint8_t* p, int b, int c) {
    const uint8_t* run = p + 16 + 32 * (b / 2);
    const uint32_t first = word(run + 4 * c) >> 4 * (b % 2), second = word(run + 16 + 4 * c) >> 4 * (b % 2);
    return (first & bytes_of(15)) | (second & bytes_of(15)) << 4;
  }
};

struct Q5K : Q4K {
  static constexpr int kBytes = 176, kWords = 8;
  static uint32_t codes(const uint8_t* p, int b, int c) {
    const uint32_t low = word(p + 48 + 32 * (b / 2) + 4 * c) >> 4 * (b % 2), fifth = word(p + 16 + 4 * c) >> b;
    return (low & bytes_of(15)) | (fifth & bytes_of(1)) << 4;
  }
};

struct Q6K {
  static constexpr int kBytes = 210, kSubs = 2, kWords = 8;
  static constexpr bool kMins = false;
  static const uint8_t* half(const uint8_t* p, int) { return p + 208; }
  static uint8_t scale(const uint8_t* p, int sub) { return p[192 + sub]; }
  static uint8_t min(const uint8_t*, int) { return 0; }
  static uint32_t codes(const uint8_t* p, int b, int c) {
    const int i = b % 4;
    const uint32_t low = word(p + 64 * (b / 4) + 32 * (i % 2) + 4 * c) >> 4 * (i / 2);
    const uint32_t high = word(p + 128 + 32 * (b / 4) + 4 * c) >> 2 * i;
    const uint32_t code = (low & bytes_of(15)) | (high & bytes_of(3)) << 4;
    return ((code | bytes_of(128)) - bytes_of(32)) ^ bytes_of(128);
  }
};

template <class Super>
void turn_supers(const uint8_t* from, int64_t row_bytes, int64_t lanes, uint8_t* to) {
  constexpr int kHeader = Super::kMins ? 4 : 2, kFields = Super::kSubs * (Super::kMins ? 2 : 1);
  constexpr int64_t kBlockBytes = kRows * (kFields + 4 * Super::kWords);
  for (int64_t at = 0; at < row_bytes; at += Super::kBytes, to += kRows * kHeader + kSuper / kBlock * kBlockBytes)
    for (int64_t r = 0; r < lanes; ++r) {
      const uint8_t* p = from + r * row_bytes + at;
      for (int i = 0; i < kHeader / 2; ++i) std::memcpy(to + 2 * (kRows * i + r), Super::half(p, i), 2);
      uint8_t* block = to + kRows * kHeader;
      for (int b = 0; b < kSuper / kBlock; ++b, block += kBlockBytes) {
        for (int s = 0; s < Super::kSubs; ++s) block[kRows * s + r] = Super::scale(p, Super::kSubs * b + s);
        if (Super::kMins) block[kRows + r] = Super::min(p, b);
        for (int c = 0; c < Super::kWords; ++c) {
          const uint32_t codes = Super::codes(p, b, c);
          std::memcpy(block + kRows * kFields + 4 * (kRows * c + r), &codes, 4);
        }
      }
    }
}

using Turn = void (*)(const uint8_t* from, int64_t row_bytes, int64_t lanes, uint8_t* to);

// By the bytes of a float, the halves and words of a block, or the bits of a K-quant; null where numpy packs.
Turn turn_of(int64_t item, int64_t scales, int64_t words, int64_t bits) {
  if (bits) return bits == 4 ? turn_supers<Q4K> : bits == 5 ? turn_supers<Q5K> : bits == 6 ? turn_supers<Q6K> : nullptr;
  if (item == 2) return turn_floats<2>;
  if (item == 4) return turn_floats<4>;
  if (scales == 1 && words == 4) return turn_blocks<1, 4>;
  if (scales == 2 && words == 4) return turn_blocks<2, 4>;
  if (scales == 1 && words == 8) return turn_blocks<1, 8>;
  return nullptr;
}

}  // namespace
}  // namespace specsparse

// Fills out[ceil(rows / 16)][group_bytes]; false, with nothing written, where there is no such function.
extern "C" __attribute__((visibility("default"))) int specsparse_pack(uint8_t* out, const uint8_t* raw, int64_t rows,
                                                                      int64_t row_bytes, int64_t item, int64_t scales,
                                                                      int64_t words, int64_t bits, int64_t group_bytes) {
  using namespace specsparse;
  const Turn turn = turn_of(item, scales, words, bits);
  if (!turn) return 0;
  for (int64_t first = 0; first < rows; first += kRows, out += group_bytes) {
    const int64_t lanes = std::min<int64_t>(kRows, rows - first);
    if (lanes < kRows) std::memset(out, 0, group_bytes);
    turn(raw + first * row_bytes, row_bytes, lanes, out);
  }
  return 1;
}
