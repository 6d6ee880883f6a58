// Kernels that read the rows of single neurons. Every table computes the same bits; `sparse.inl` is the definition.
#pragma once

#include <cstdint>

#include "dense/descriptor.h"
#include "simd/ops.h"

namespace specsparse {

constexpr int kChunk = 64;      // columns read at a time: two blocks
constexpr int kRowTokens = 4;   // rows of activations that one pass over a neuron serves
constexpr int kNibbleZero = 8;  // what Q4_0 takes off its codes; other codes of four bits have no zero
constexpr int kRowGroup = 4;    // neurons that are added to the output at a time
constexpr int64_t kNarrowBytes = 4 << 10;  // of a group: several are multiplied side by side

// A matrix of neurons, one row each; specsparse/kernels/neurons.py gives the bytes.
struct NeuronRows {
  const uint8_t* data;
  int64_t rows, cols, row_bytes;
  Codes codes;
  Scales scales;
  int64_t sub;
  int32_t zero;
  const int8_t* lut;  // 16 values, or null
  bool is_float() const { return codes >= Codes::kF32; }
  int64_t chunks() const { return (cols + kChunk - 1) / kChunk; }
  int64_t subs() const { return chunks() * kChunk / sub; }
  int64_t code_bytes() const {  // of a chunk
    return codes == Codes::kNibble ? kChunk / 2 : codes == Codes::kInt8 ? kChunk : codes == Codes::kF32 ? 4 * kChunk : 2 * kChunk;
  }
  const uint8_t* row(int64_t j) const { return data + j * row_bytes; }
  // Asks for row j.
  void fetch(int64_t j) const {
    for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(row(j) + at);
  }
};

// A down projection of Q4_0 by blocks of 32 neurons: f16 scales of all outputs, then each neuron's codes as `NeuronRows` has
// them. kernels/neurons.py packs it.
struct NeuronBlocks {
  const uint8_t* data = nullptr;
  int64_t count = 0, outputs = 0;  // of blocks; whole chunks
  int64_t row_bytes() const { return outputs / 2; }
  int64_t block_bytes() const { return 2 * outputs + kBlock * row_bytes(); }
};

// Neurons as the caller describes them. Not copyable: the rows point to the table.
struct NeuronDescription {
  NeuronRows rows{};
  int8_t lut[16];

  NeuronDescription() = default;
  NeuronDescription(const NeuronDescription&) = delete;
  NeuronDescription& operator=(const NeuronDescription&) = delete;

  // False if there are no kernels for it or the `bytes` of data do not hold it.
  bool read(const MatrixDescriptor& d, const void* data, int64_t bytes);
};

// A chunk of a row of activations in blocks of 32, as int8; and -kNibbleZero times the sum of the codes of each four columns.
struct alignas(64) InputChunk {
  int8_t codes[kChunk];
  int32_t lows[kChunk / 4];
};

// One row of activations, filled up with zeros to whole chunks (its scales to a multiple of 16).
struct Input {
  const float* x;  // normalised
  const InputChunk* chunks;
  const float* scales[2];  // of each sub-block of 32 columns; of 16
  const float* sums[2];    // scale * sum of the codes of each sub-block of 32 columns; of 16
};

struct SparseOps {
  // out[t] = neuron j times inputs[t], 1 <= count <= kRowTokens. Meanwhile row `next` is fetched (or null).
  void (*dot)(const NeuronRows& w, int64_t j, const uint8_t* next, const Input* const* inputs, int count, float* out,
              float* scratch);
  // out[i] = neuron js[i] times x, 1 <= count <= kRowGroup: sums that do not wait for each other. Meanwhile rows next[i] are
  // fetched.
  void (*dot_group)(const NeuronRows& w, const int32_t* js, const uint8_t* const* next, int count, const Input& x, float* out,
                    float* scratch);
  // Whether it pays to multiply row by row by `dot_group` where several rows share neurons of blocks.
  bool groups;
  // y += a[i] * neuron js[i] for i < count in order, columns of chunks [begin, end), `begin` a multiple of 4. y is in an order of
  // the table's own, which `sum_parts` knows. Meanwhile the same columns of neurons next[i] are fetched.
  void (*add)(const NeuronRows& w, const int32_t* js, const float* a, const int32_t* next, int64_t count, int64_t begin,
              int64_t end, float* y, float* scratch);
  // out = 0 + parts[0] + parts[1] .., by column: sums that `add` has filled, from a multiple of 4 chunks on, `chunks` of them.
  // There is room to read whole pairs of chunks.
  void (*sum_parts)(const NeuronRows& w, const float* const* parts, int count, int64_t chunks, float* out);
  // out[16 i + r] = row 16 (g + i) + r of a matrix of floats times x, i < count <= kRowGroup: what the dense kernels give.
  void (*dot_floats)(const Matrix& w, int64_t g, int count, const float* x, float* out);
  // out[16 i + r] = row 16 (g + i) + r of a narrow matrix of blocks times x, i < count: what the dense kernels give. False, with
  // nothing written, where it is wide or of another kind than Q4_0 and Q8_0.
  bool (*dot_blocks)(const Matrix& w, int64_t g, int64_t count, const QBlock* x, float* out);
  // Different bits of two packed rows of `words` words.
  int64_t (*differing)(const uint64_t* a, const uint64_t* b, int64_t words);
  // out[i] = what the dense kernels give for row js[i] of Q4_0, i < count <= 16; block b of the input is x[b * step]. out has room
  // for sixteen, scratch for 32 * (blocks of whole chunks, rounded up to 16). Meanwhile `count` rows `next` are fetched, unless it
  // is null.
  void (*dot_neurons)(const NeuronRows& w, const int32_t* js, int count, const QBlock* x, int64_t step, const uint8_t* const* next,
                      float* out, float* scratch);
  // y += what the dense kernels give for the outputs of chunks [begin, end), y's first; read for the codes of x that are not 0.
  // Block b of x is x[b * step].
  void (*project)(const NeuronBlocks& w, int64_t begin, int64_t end, const QBlock* x, int64_t step, float* y);
};

// Floats of scratch that `dot` and `add` need.
inline int64_t scratch_floats(const NeuronRows& w) {
  return (2 * kRowTokens + 2) * (w.chunks() * kChunk / 16 + 32);
}

extern const SparseOps kPortableSparseOps;
#if defined(__x86_64__)
extern const SparseOps kAvx2SparseOps;
extern const SparseOps kAvx512SparseOps;
#endif

// The table that goes with ops().
const SparseOps& sparse_ops();

}  // namespace specsparse
