// The XLA FFI handler of the table kernels.
#include <algorithm>
#include <vector>

#include "dense/linear.h"
#include "ffi/bind.h"
#include "lut/lut.h"
#include "pool/pool.h"

namespace ffi = xla::ffi;

namespace specsparse {
namespace {

constexpr int64_t kBlocksPerItem = 64;  // of which one item builds the tables

// Rows of activations as tables: memory that grows, and is kept from call to call.
struct Buffer {
  std::vector<float> x;
  std::vector<QBlock> q;
  std::vector<uint8_t> tables;
  std::vector<LutFactors> factors;
  std::vector<LutRow> rows;
};

// y = w x (+ residual): the tables of all rows, then the groups of w.
class LutProduct final : public Phases {
 public:
  LutProduct(const Matrix& w, Sums kind, const float* x, const float* residual, int64_t total, float* y, Buffer& buffer)
      : w_(w), kind_(kind), x_(x), residual_(residual), total_(total), y_(y), blocks_(w.cols / kBlock), buffer_(buffer) {
    const size_t all = total * blocks_, stride = table_stride(kind);
    buffer.x.resize(std::max<size_t>(buffer.x.size(), kind == Sums::kExact ? total * w.cols : 0));
    buffer.q.resize(std::max<size_t>(buffer.q.size(), kind == Sums::kExact ? all : 0));
    buffer.tables.resize(std::max<size_t>(buffer.tables.size(), all * stride));
    buffer.factors.resize(std::max<size_t>(buffer.factors.size(), all));
    buffer.rows.resize(total);
    for (int64_t t = 0; t < total; ++t)
      buffer.rows[t] = {buffer.tables.data() + t * blocks_ * stride, buffer.factors.data() + t * blocks_};
    parts_ = (blocks_ + kBlocksPerItem - 1) / kBlocksPerItem;
    step_ = groups_per_item(w.groups(), w.group_bytes);
  }

  int count() const override { return 2; }
  int64_t items(int phase) const override { return phase ? (w_.groups() + step_ - 1) / step_ : total_ * parts_; }
  void run(int phase, int64_t item) override { phase ? multiply(item) : build(item); }

 private:
  void build(int64_t item) {
    const int64_t row = item / parts_, first = item % parts_ * kBlocksPerItem;
    const int64_t count = std::min(kBlocksPerItem, blocks_ - first), at = row * w_.cols + first * kBlock;
    QBlock* q = kind_ == Sums::kExact ? buffer_.q.data() + row * blocks_ + first : nullptr;
    if (q)
      ops().prepare(x_ + at, nullptr, 0.0f, {count * kBlock, count, buffer_.x.data() + at, q}, 0, true);
    const LutRow& to = buffer_.rows[row];
    lut_ops().build(kind_, x_ + at, q, count, w_.zero, {to.tables + first * table_stride(kind_), to.factors + first});
  }

  void multiply(int64_t item) {
    alignas(64) float y[kLutTokens * kRows];
    for (int64_t g = item * step_; g < std::min(w_.groups(), (item + 1) * step_); ++g)
      for (int64_t row = 0; row < total_; row += kLutTokens) {
        const int tokens = static_cast<int>(std::min<int64_t>(kLutTokens, total_ - row));
        lut_ops().dot(kind_, w_, g, buffer_.rows.data() + row, tokens, y);
        for (int t = 0; t < tokens; ++t) write(y + kRows * t, row + t, g);
      }
  }

  void write(const float* y, int64_t row, int64_t g) {
    const int64_t at = row * w_.rows + g * kRows, count = std::min<int64_t>(kRows, w_.rows - g * kRows);
    for (int64_t r = 0; r < count; ++r) y_[at + r] = residual_ ? residual_[at + r] + y[r] : y[r];
  }

  const Matrix& w_;
  Sums kind_;
  const float *x_, *residual_;
  int64_t total_;
  float* y_;
  int64_t blocks_, parts_, step_;
  Buffer& buffer_;
};

ffi::Error lut_linear(ffi::Buffer<ffi::F32> x, ffi::AnyBuffer data, ffi::Buffer<ffi::F32> residual,
                      ffi::ResultBuffer<ffi::F32> y, Ints matrices, int64_t sums) {
  Description d;
  const Matrix& w = d.matrix;
  if (!read_matrix(matrices, 0, data, &d) || w.codes != Codes::kNibble || w.lut ||
      (w.scales != Scales::kD && w.scales != Scales::kDm) ||
      w.cols != x.dimensions().back() || sums < 0 || sums > static_cast<int64_t>(Sums::kInt6))
    return ffi::Error::InvalidArgument("specsparse lut_linear: the matrix does not fit");
  thread_local Buffer buffer;
  LutProduct product(w, Sums(sums), x.typed_data(), residual.element_count() ? residual.typed_data() : nullptr,
                     x.dimensions()[0], y->typed_data(), buffer);
  run_phases(product);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_lut_linear, lut_linear,
                              (results<Floats>(args<Floats, AnyBuffer, Floats>())
                                   .Attr<Ints>("matrices").Attr<int64_t>("sums")));

#pragma GCC visibility pop

}  // namespace specsparse
