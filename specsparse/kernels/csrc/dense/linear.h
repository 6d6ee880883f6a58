// Packed matrices times rows of activations, as work that is shared out item by item.
#pragma once

#include <cstdint>
#include <vector>

#include "dense/descriptor.h"
#include "pool/pool.h"
#include "simd/ops.h"

namespace specsparse {

// A matrix as the caller describes it. Not copyable: the matrix points to the table.
struct Description {
  Matrix matrix;
  int8_t lut[16];
  const float* bias = nullptr;  // of the outputs, or null

  Description() = default;
  // Matrix `place` of those that lie one after the other from `first` on; their biases too. `first` has the table: it must outlive this.
  Description(const Description& first, int64_t place);
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  // False if there are no kernels for it or the `bytes` of data do not hold the matrix.
  bool read(const MatrixDescriptor& d, const void* data, int64_t bytes);
};

// Rows of a tile of `rows` rows of activations, which is filled up with rows of no meaning.
int64_t tile_of(int64_t rows);

// Rows of activations: memory that grows, and is kept from call to call.
struct ActivationBuffer {
  std::vector<float> x;
  std::vector<QBlock> q;

  Activations reserve(int64_t rows, int64_t cols, bool quantise);
};

// Groups one item takes: enough items for balance, few enough that the counter costs nothing.
int64_t groups_per_item(int64_t groups, int64_t group_bytes);

// Rows of an item of a preparation of `total` rows, by the threads there are now.
int64_t preparation_step(int64_t total);

// Normalises rows (norm may be null) and quantises them, as the first factor of a product.
struct Preparation {
  const float* from;  // [., cols]
  const float* norm;
  float eps;
  bool quantise;
  int64_t total;
  const int32_t* rows;  // row i of `to` is row rows[i] of `from`; null: row i
  Activations to;
  int64_t step = preparation_step(total);  // kept: another caller may change the number of threads meanwhile

  int64_t items() const;
  void run(int64_t item) const;
};

// out = x + norm(y), row by row: what ends a block whose output is normalised.
struct NormedSum {
  const float *x, *y;  // [., cols]
  const float* norm;
  float eps;
  int64_t cols, total;
  const int32_t* rows;  // row i is row rows[i] of all three; null: row i
  float* out;           // may be x
  int64_t step = preparation_step(total);

  int64_t items() const { return (total + step - 1) / step; }
  void run(int64_t item) const;
};

// Where a product is written.
struct Output {
  float* data;
  const float* bias;      // or null
  const float* residual;  // or null
  int64_t width;
};

// Up to three matrices times the same rows. With an activation the two matrices are gate and up, and one output holds
// act(gate) * up.
class Product {
 public:
  // Row i of `x` goes to row rows[i] of the outputs, to row i where `rows` is null. The arguments must outlive the product.
  Product(const Description* const* weights, int count, const Output* outs, const Activations& x, int64_t total,
          const int32_t* rows, Act act);

  int64_t items() const { return parts_ * chunks_; }
  void run(int64_t item) const;
  // Fetches the beginning of the weights of an item, or of a thread's share of the items.
  void prefetch(int64_t bytes, int64_t item) const;
  void prefetch(int64_t bytes, int self, int threads) const { prefetch(bytes, share_begin(items(), self, threads)); }

 private:
  bool run_groups(int m, int64_t g, int64_t row0, int64_t row1) const;
  void finish(int m, float* y, float* up, int64_t row, int tokens, int64_t group) const;
  void write(const Output& out, const float* y, int64_t row, int tokens, int64_t group) const;

  static constexpr int kMost = 3;
  const Description* weights_[kMost];
  Output outs_[kMost];
  int64_t first_[kMost + 1];  // group of each matrix, in the flat order of all groups
  Activations x_;
  int64_t total_, step_, parts_, chunks_;
  const int32_t* rows_;
  Act act_;
};

}  // namespace specsparse
