// What this machine can do at best, for comparison: memory reads, int8 and float32 multiply-adds on all threads of the pool.
// Each loop uses the instruction set that the kernels use.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "dense/tiles.h"
#include "simd/ops.h"
#include "pool/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define SPECSPARSE_TARGET(isa) __attribute__((target(isa)))
#endif

#define SPECSPARSE_EXPORT extern "C" __attribute__((visibility("default")))

namespace specsparse {
namespace {

volatile int64_t sink;  // results go here, so that no loop is optimised away

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

constexpr int kChains = 10;            // accumulators: about latency times issue width, and few enough for 16 registers
constexpr int64_t kLine = 64;          // bytes of a cache line
constexpr int64_t kPiece = 256 << 10;  // bytes of an item of the bandwidth loop

// Multiply-adds of one call, `steps` times kChains vectors.
using Work = int64_t (*)(int64_t steps);
// Reads `lines` cache lines.
using Read = int64_t (*)(const uint8_t* p, int64_t lines);

struct Peaks {
  Read read;
  Work int8, f32;
};

int64_t read_portable(const uint8_t* p, int64_t lines) {
  uint64_t acc[8] = {};
  for (int64_t i = 0; i < lines; ++i, p += kLine) {
    uint64_t words[8];
    std::memcpy(words, p, kLine);
    for (int j = 0; j < 8; ++j) acc[j] += words[j];
  }
  for (int j = 1; j < 8; ++j) acc[0] += acc[j];
  return static_cast<int64_t>(acc[0]);
}

int64_t int8_portable(int64_t steps) {
  int8_t w[256], x[256];
  for (int i = 0; i < 256; ++i) w[i] = static_cast<int8_t>(i + sink), x[i] = static_cast<int8_t>(3 * i + sink);
  int32_t total = 0;
  for (int64_t s = 0; s < steps; ++s) {
    int32_t acc = 0;
    for (int i = 0; i < 256; ++i) acc += w[i] * x[i];
    total += acc;
    asm volatile("" : : "r"(w), "r"(x) : "memory");  // or the sum would be computed once
  }
  sink = total;
  return 256 * steps;
}

int64_t f32_portable(int64_t steps) {
  float acc[16 * kChains];
  for (int i = 0; i < 16 * kChains; ++i) acc[i] = static_cast<float>(i + sink);
  for (int64_t s = 0; s < steps; ++s)
    for (int i = 0; i < 16 * kChains; ++i) acc[i] = acc[i] * 0.5f + 1.0f;
  float total = 0;
  for (float a : acc) total += a;
  sink = static_cast<int64_t>(total);
  return 16 * kChains * steps;
}

#if defined(__x86_64__)
// `sum`, the total of COUNT accumulators that begin at START, with STEP done to each in every step; both may read `c`. A macro,
// since a function of another target is not inlined.
#define SPECSPARSE_CHAINS(VECTOR, COUNT, START, STEP, ADD)                               \
  VECTOR acc[COUNT];                                                                     \
  _Pragma("GCC unroll 16") for (int c = 0; c < COUNT; ++c) acc[c] = START;               \
  for (int64_t s = 0; s < steps; ++s)                                                    \
    _Pragma("GCC unroll 16") for (int c = 0; c < COUNT; ++c) acc[c] = STEP;              \
  _Pragma("GCC unroll 16") for (int c = 1; c < COUNT; ++c) acc[0] = ADD(acc[0], acc[c]); \
  const VECTOR sum = acc[0]

SPECSPARSE_TARGET("avx2") int64_t read_avx2(const uint8_t* p, int64_t lines) {
  __m256i acc[4] = {};
  for (int64_t i = 0; i < lines; ++i, p += kLine) {
    const __m256i* line = reinterpret_cast<const __m256i*>(p);
    __m256i* to = acc + 2 * (i & 1);
    to[0] = _mm256_add_epi64(to[0], _mm256_loadu_si256(line));
    to[1] = _mm256_add_epi64(to[1], _mm256_loadu_si256(line + 1));
  }
  const __m256i all = _mm256_add_epi64(_mm256_add_epi64(acc[0], acc[1]), _mm256_add_epi64(acc[2], acc[3]));
  return _mm256_extract_epi64(all, 0) + _mm256_extract_epi64(all, 3);
}

SPECSPARSE_TARGET("avx2") int64_t int8_avx2(int64_t steps) {
  constexpr int kPairs = 8;  // a product and a sum each, with one temporary
  const __m256i x = _mm256_set1_epi8(static_cast<char>(sink));
  SPECSPARSE_CHAINS(__m256i, kPairs, _mm256_set1_epi8(static_cast<char>(c)),
                    _mm256_add_epi16(acc[c], _mm256_maddubs_epi16(acc[c], x)), _mm256_add_epi16);
  sink = _mm256_extract_epi16(sum, 0);
  return 32 * kPairs * steps;
}

SPECSPARSE_TARGET("avx2,fma") int64_t f32_avx2(int64_t steps) {
  const __m256 half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1.0f);
  SPECSPARSE_CHAINS(__m256, kChains, _mm256_set1_ps(static_cast<float>(c + sink)), _mm256_fmadd_ps(acc[c], half, one),
                    _mm256_add_ps);
  sink = static_cast<int64_t>(_mm256_cvtss_f32(sum));
  return 8 * kChains * steps;
}

SPECSPARSE_TARGET("avx512f") int64_t read_avx512(const uint8_t* p, int64_t lines) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 <= lines; i += 4, p += 4 * kLine) {
    a = _mm512_add_epi64(a, _mm512_loadu_si512(p));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(p + kLine));
    c = _mm512_add_epi64(c, _mm512_loadu_si512(p + 2 * kLine));
    d = _mm512_add_epi64(d, _mm512_loadu_si512(p + 3 * kLine));
  }
  for (; i < lines; ++i, p += kLine) a = _mm512_add_epi64(a, _mm512_loadu_si512(p));
  return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d)));
}

// Sums of products in place. GCC makes copies of the sums that it is given by the intrinsics: ten products of a round took as
// long as sixteen, and the peak came out at half to two thirds of what it is.
#define SPECSPARSE_SUM(NAME, ISA, ENCODING, VECTOR)                                                     \
  SPECSPARSE_TARGET(ISA) inline VECTOR NAME(VECTOR sum, VECTOR w, VECTOR x) {                           \
    asm(ENCODING "vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));                                   \
    return sum;                                                                                         \
  }
SPECSPARSE_SUM(sum_512, "avx512f,avx512vnni", "", __m512i)

SPECSPARSE_TARGET("avx512f,avx512vnni") int64_t int8_avx512(int64_t steps) {
  constexpr int kMany = 16;  // there are 32 registers
  const __m512i w = _mm512_set1_epi32(static_cast<int>(sink)), x = _mm512_set1_epi32(0x01020304);
  SPECSPARSE_CHAINS(__m512i, kMany, _mm512_set1_epi32(c), sum_512(acc[c], w, x), _mm512_add_epi32);
  sink = _mm512_reduce_add_epi32(sum);
  return 64 * kMany * steps;
}

#define SPECSPARSE_VNNI(SUM)                                                                        \
  const __m256i w = _mm256_set1_epi32(static_cast<int>(sink)), x = _mm256_set1_epi32(0x01020304);   \
  SPECSPARSE_CHAINS(__m256i, kChains, _mm256_set1_epi32(c), SUM(acc[c], w, x), _mm256_add_epi32);   \
  sink = _mm256_extract_epi32(sum, 0);                                                              \
  return 32 * kChains * steps

#if defined(SPECSPARSE_AVXVNNI)
SPECSPARSE_SUM(sum_avxvnni, "avx2,avxvnni", "%{vex%} ", __m256i)
SPECSPARSE_SUM(sum_vnni256, "avx2,avx512vl,avx512vnni", "", __m256i)
SPECSPARSE_TARGET("avx2,avxvnni") int64_t int8_avxvnni(int64_t steps) { SPECSPARSE_VNNI(sum_avxvnni); }
SPECSPARSE_TARGET("avx2,avx512vl,avx512vnni") int64_t int8_vnni256(int64_t steps) { SPECSPARSE_VNNI(sum_vnni256); }
#endif

#if defined(SPECSPARSE_AMX)
// Four tiles of sums, so that none waits for itself.
int64_t int8_amx(int64_t steps) {
  static const uint8_t ones[16 * 64] = {1};
  TileShapes shapes;
  for (int t = 0; t < kTiles; ++t) shapes.set(t, 16, 64);
  ProcessorTiles::configure(shapes);
  ProcessorTiles::load<4>(ones, 64), ProcessorTiles::load<5>(ones, 64);
  ProcessorTiles::zero<0>(), ProcessorTiles::zero<1>(), ProcessorTiles::zero<2>(), ProcessorTiles::zero<3>();
  const int64_t rounds = steps / 64 + 1;
  for (int64_t s = 0; s < rounds; ++s) {
    ProcessorTiles::add_products<0, 4, 5>(), ProcessorTiles::add_products<1, 4, 5>();
    ProcessorTiles::add_products<2, 4, 5>(), ProcessorTiles::add_products<3, 4, 5>();
  }
  ProcessorTiles::release();
  return rounds * 4 * 16 * 16 * 64;
}
#endif

SPECSPARSE_TARGET("avx512f") int64_t f32_avx512(int64_t steps) {
  const __m512 half = _mm512_set1_ps(0.5f), one = _mm512_set1_ps(1.0f);
  SPECSPARSE_CHAINS(__m512, kChains, _mm512_set1_ps(static_cast<float>(c + sink)), _mm512_fmadd_ps(acc[c], half, one),
                    _mm512_add_ps);
  sink = static_cast<int64_t>(_mm512_reduce_add_ps(sum));
  return 16 * kChains * steps;
}
#endif

const Peaks& peaks() {
  static constexpr Peaks kPortable = {read_portable, int8_portable, f32_portable};
#if defined(__x86_64__)
  static constexpr Peaks kAvx512 = {read_avx512, int8_avx512, f32_avx512}, kAvx2 = {read_avx2, int8_avx2, f32_avx2};
  const Ops& o = ops();
#if defined(SPECSPARSE_AMX)
  static constexpr Peaks kTiles = {read_avx512, int8_amx, f32_avx512};
  if (!std::strcmp(o.name, "amx")) return kTiles;
#endif
#if defined(SPECSPARSE_AVXVNNI)
  static constexpr Peaks kVnni = {read_avx2, int8_avxvnni, f32_avx2}, kVnni256 = {read_avx2, int8_vnni256, f32_avx2};
  if (!std::strcmp(o.name, "avxvnni")) return o.dot == dot_vnni256 ? kVnni256 : kVnni;
#endif
  if (o.registers == Registers::kAvx512) return kAvx512;
  if (o.registers == Registers::kAvx2) return kAvx2;
#endif
  return kPortable;
}

// The best of a few rounds of many short items each: a neighbour that takes a core for a while spoils a round, not the figure.
double rate(Work work, double seconds) {
  constexpr int kRounds = 5;
  constexpr int64_t kProbe = 4096;
  double one = 1e9;  // seconds of a probe
  for (int i = 0; i < kRounds; ++i) {
    const double start = now();
    work(kProbe);
    one = std::min(one, now() - start);
  }
  const int64_t items = 16 * threads();
  const double probes = seconds / kRounds * threads() / (static_cast<double>(items) * std::max(one, 1e-7));
  const int64_t steps = static_cast<int64_t>(kProbe * probes) + 1;
  double best = 0;
  for (int i = 0; i < kRounds; ++i) {
    std::atomic<int64_t> total{0};
    const double start = now();
    parallel(items, [&](int64_t) { total += work(steps); });
    best = std::max(best, static_cast<double>(total) / (now() - start));
  }
  return best;
}

}  // namespace
}  // namespace specsparse

// Bytes per second of one pass over `bytes` (a multiple of 64) at `data`.
SPECSPARSE_EXPORT double specsparse_read_rate(const void* data, int64_t bytes) {
  using namespace specsparse;
  const Read read = peaks().read;
  const uint8_t* p = static_cast<const uint8_t*>(data);
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  const double start = now();
  parallel(pieces, [&](int64_t i) {
    const int64_t end = (i + 1) * kPiece < bytes ? (i + 1) * kPiece : bytes;
    sink = read(p + i * kPiece, (end - i * kPiece) / kLine);
  });
  return static_cast<double>(bytes) / (now() - start);
}

// int8 multiply-adds per second, all threads, the best of five rounds that take about `seconds` together.
SPECSPARSE_EXPORT double specsparse_int8_rate(double seconds) { return specsparse::rate(specsparse::peaks().int8, seconds); }

// float32 fused multiply-adds per second (unfused where the processor has none), all threads.
SPECSPARSE_EXPORT double specsparse_f32_rate(double seconds) { return specsparse::rate(specsparse::peaks().f32, seconds); }
