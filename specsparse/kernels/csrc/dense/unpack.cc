#include "dense/unpack.h"

#include <cstring>

#define SPECSPARSE_ISA portable
#include "simd/simd_portable.h"

namespace specsparse {
namespace {

float half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

float float_at(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

void unpack_floats(const Matrix& w, const uint8_t* p, int64_t lane, float* out) {
  const int64_t size = w.codes == Codes::kF32 ? 4 : 2;
  for (int64_t k = 0; k < w.cols; ++k) {
    const uint8_t* at = p + (k * kRows + lane) * size;
    if (w.codes == Codes::kF32) {
      out[k] = float_at(at);
    } else if (w.codes == Codes::kF16) {
      out[k] = half_at(at);
    } else {
      uint16_t h;
      std::memcpy(&h, at, 2);
      const uint32_t bits = static_cast<uint32_t>(h) << 16;
      std::memcpy(&out[k], &bits, 4);
    }
  }
}

int32_t code_at(const Matrix& w, const uint8_t* codes, int64_t lane, int64_t column) {
  if (w.codes == Codes::kInt8) return static_cast<int8_t>(codes[64 * (column / 4) + 4 * lane + column % 4]);
  const int64_t low = column % 16;
  const uint8_t byte = codes[64 * (low / 4) + 4 * lane + low % 4];
  const int32_t code = column < 16 ? byte & 15 : byte >> 4;
  return w.lut ? w.lut[code] : code - w.zero;
}

}  // namespace

void unpack_row(const Matrix& w, int64_t row, float* out) {
  const uint8_t* p = w.data + row / kRows * w.group_bytes;
  const int64_t lane = row % kRows;
  if (w.is_float()) return unpack_floats(w, p, lane, out);
  const int64_t subs = kBlock / w.sub;
  const bool header = w.scales == Scales::kSuper || w.scales == Scales::kSuperMin;
  float super_d = 0, super_m = 0;
  for (int64_t b = 0; b < w.cols / kBlock; ++b) {
    if (header && b % (kSuper / kBlock) == 0) {
      super_d = half_at(p + 2 * lane), p += 32;
      if (w.scales == Scales::kSuperMin) super_m = half_at(p + 2 * lane), p += 32;
    }
    float d[2] = {}, m[2] = {};
    for (int64_t s = 0; s < subs; ++s) {
      if (w.scales == Scales::kF32) d[s] = float_at(p + 4 * lane), p += 64;
      if (w.scales == Scales::kD || w.scales == Scales::kDm) d[s] = half_at(p + 2 * lane), p += 32;
      if (w.scales == Scales::kDm) m[s] = half_at(p + 2 * lane), p += 32;
      if (header) d[s] = super_d * static_cast<int8_t>(p[lane]), p += 16;
    }
    if (w.scales == Scales::kSuperMin)
      for (int64_t s = 0; s < subs; ++s) m[s] = super_m * p[lane], p += 16;
    for (int64_t c = 0; c < kBlock; ++c) {
      const int64_t s = c / w.sub;
      const float product = d[s] * static_cast<float>(code_at(w, p, lane, c));
      out[b * kBlock + c] = w.scales == Scales::kSuperMin ? product - m[s] : w.scales == Scales::kDm ? product + m[s] : product;
    }
    p += kRows * kBlock / (w.codes == Codes::kNibble ? 2 : 1);
  }
}

}  // namespace specsparse
