// What an instruction set has to provide. Every table computes the same bits.
#pragma once

#include <cstdint>

namespace specsparse {

enum class Codes : int64_t { kNibble, kInt8, kF32, kF16, kBf16 };
enum class Scales : int64_t { kNone, kD, kDm, kF32, kSuper, kSuperMin };
enum class Act : int64_t { kNone, kSilu, kRelu, kRelu2, kGeluTanh, kClampedSwiglu };
enum class KvType : int64_t { kF32, kF16, kBf16, kQ8 };

constexpr int kRows = 16;    // rows of a group
constexpr int kBlock = 32;   // columns that share an activation scale
constexpr int kSuper = 256;  // columns under one super-block header

// A packed matrix; docs/layouts.md gives the bytes.
struct Matrix {
  const uint8_t* data;
  int64_t rows, cols, group_bytes;
  Codes codes;
  Scales scales;
  int64_t sub;
  int32_t zero;
  const int8_t* lut;  // 16 values, or null
  int64_t groups() const { return (rows + kRows - 1) / kRows; }
  bool is_float() const { return codes >= Codes::kF32; }
};

// 32 quantised activations and what the kernels need to know of them: one cache line.
struct alignas(64) QBlock {
  float scale;      // max|x| / 127
  float shift;      // scale * sum
  float shifts[2];  // scale * sum of each half
  int32_t sum;      // of q
  int32_t less[3];  // -128 * sum, and of each half: what codes count too much that were made unsigned by adding 128
  int8_t q[kBlock];
};

// Rows of activations as the kernels read them: float32, and quantised in blocks of 32.
struct Activations {
  int64_t cols, blocks;
  float* x;   // [rows, cols], normalised
  QBlock* q;  // [ceil(rows / tile), blocks, tile]: blocks of a tile's rows side by side, so that kernels have one address
  int64_t tile = 1;
  __attribute__((always_inline)) QBlock* at(int64_t row, int64_t block) const { return q + (row / tile * blocks + block) * tile + row % tile; }
};

constexpr int kMostQueries = 64;  // of a tile of attention

// Attention of query vectors that share one key/value head and one sequence.
struct AttendTile {
  const void* k;      // [C/16, d, 16]; of q8_0 the scales follow the d codes, see docs/layouts.md
  const void* v;      // [C, d]
  KvType type;
  int64_t d;
  int64_t shared;     // committed slots, seen by every query
  int queries;        // 1 .. kMostQueries
  const float* q[kMostQueries];  // scaled by 1/sqrt(d)
  float* out[kMostQueries];
  // Slots beyond `shared` that query j sees, in position order; for a chain they are shared, shared + 1, ...
  const int32_t* tail[kMostQueries];
  int64_t tails[kMostQueries];
  // Of what query j sees, counted in position order, all before `first` lies outside its window.
  int64_t first[kMostQueries];
  int64_t common;       // from here on every query sees what is shared
  int64_t block, stop;  // blocks of sixteen slots that any query sees
  float* scores;        // [queries, stride]: of every slot, then weights, and in the last place what divides them
  int64_t stride;       // over 16 * stop
  float* copy;          // [kAttendChunk, d]
};
constexpr int kAttendChunk = 64;  // slots that are widened at a time for a tile of many queries
constexpr int kMostTile = 16;
constexpr int kGroupsAtOnce = 3, kGroupTile = 8;

// Vectors that a table's other functions use: which tables of neuron kernels and of peaks go with it.
enum class Registers { kPortable, kAvx2, kAvx512 };

struct Ops {
  const char* name;
  Registers registers;
  int tile;  // rows of activations that `dot` is best given, at most kMostTile
  // Normalises row `from` (norm may be null) and quantises it into row `to` of `out`.
  void (*prepare)(const float* from, const float* norm, float eps, const Activations& out, int64_t to, bool quantise);
  // y[t * 16 + r] = dot of row r of group g with activation rows row .. row + tokens - 1, which lie in one tile.
  void (*dot)(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y);
  // gate <- act(gate) * up, `count` a multiple of 16.
  void (*glu)(float* gate, const float* up, int64_t count, Act act);
  // The steps of attention: scores of blocks block .. stop - 1, those of query j to weights, and columns of the outputs.
  void (*score)(const AttendTile& tile, int64_t block, int64_t stop);
  void (*soften)(const AttendTile& tile, int j);
  void (*weigh)(const AttendTile& tile, int64_t column, int64_t end);
  void (*store_kv)(const float* k, const float* v, int64_t d, int64_t slot, KvType type, void* cache_k, void* cache_v);
  // out[i] = exp((x[i] - top) / temperature), `count` a multiple of 16.
  void (*exp_shifted)(const float* x, int64_t count, float top, float temperature, float* out);
  // Sums of 256 neighbours: lane i adds lane i + 128, then i + 64, and so on. `count` a multiple of 256.
  void (*block_sums)(const float* x, int64_t count, float* sums);
  // Largest of each 64 neighbours; `count` a multiple of 64.
  void (*block_maxima)(const float* x, int64_t count, float* maxima);
  // The largest value, NaN aside (-inf where there is none); `*wild`: whether any is NaN or +inf. Any `count`.
  float (*peak)(const float* x, int64_t count, bool* wild);
  // Called by a thread that leaves off calling `dot`; may be null.
  void (*leave)();
  // `dot` of kGroupsAtOnce groups from g on, which may be given many rows of activations, of whole tiles but for the last:
  // y[kGroupTile rows][group][row of them][16]. May be null; false, with nothing written, where it is not faster.
  bool (*dot_groups)(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y);
};

extern const Ops kPortableOps;
#if defined(__x86_64__)
extern const Ops kAvx2Ops;
extern const Ops kAvx512Ops;
bool dot_groups_avx512(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y);
// Products by AVX-VNNI in either encoding, with kAvx2Ops for the rest.
void dot_avxvnni(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y);
void dot_vnni256(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y);
bool dot_groups_avxvnni(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y);
bool dot_groups_vnni256(const Matrix& w, int64_t g, const Activations& x, int64_t row, int tokens, float* y);
#endif

// The table in use: SPECSPARSE_ISA=portable|avx2|avxvnni|avx512|amx forces one, otherwise the widest the processor has.
const Ops& ops();
// Chooses a table by name; false if the name or the processor does not have it.
bool set_ops(const char* name);
// Adds a table that is made of AVX-512's, to be chosen by its name: for tests. False where the processor has no AVX-512.
bool add_ops(void (*make)(const Ops* avx512, Ops* table));

}  // namespace specsparse
