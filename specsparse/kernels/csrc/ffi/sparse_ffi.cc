// The XLA FFI handlers of the sparse FFN and of the sign-bit predictor.
#include <algorithm>
#include <vector>

#include "ffi/bind.h"
#include "pool/pool.h"
#include "sparse/predicted.h"

namespace ffi = xla::ffi;

namespace specsparse {
namespace {

const float* optional(const ffi::Buffer<ffi::F32>& b) { return b.element_count() ? b.typed_data() : nullptr; }

ffi::Error sparse_ffn_call(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> keep, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                           ffi::AnyBuffer down, ffi::Buffer<ffi::F32> norm, ffi::Buffer<ffi::F32> residual,
                           ffi::Buffer<ffi::S32> n_valid, ffi::Buffer<ffi::F32> least, ffi::ResultBuffer<ffi::F32> y,
                           ffi::ResultBuffer<ffi::S32> kept, ffi::ResultBuffer<ffi::S32> read,
                           ffi::ResultBuffer<ffi::S32> nonzero, ffi::ResultBuffer<ffi::S32> active, Ints matrices,
                           int64_t act, float threshold, int64_t up_act, float up_threshold, float eps) {
  NeuronDescription u, d, g;
  const bool gated = gate.element_count() != 0;
  const int64_t rows = x.dimensions()[0];
  if (!read_matrix(matrices, 0, up, &u) || !read_matrix(matrices, 1, down, &d) ||
      (gated && !read_matrix(matrices, 2, gate, &g)) || u.rows.cols != x.dimensions()[1] || d.rows.rows != u.rows.rows ||
      static_cast<int64_t>(keep.element_count()) != rows * u.rows.rows)
    return ffi::Error::InvalidArgument("specsparse sparse_ffn: the matrices do not fit");
  const SparseFfn ffn{gated ? &g.rows : nullptr,
                      u.rows,
                      d.rows,
                      optional(norm),
                      eps,
                      {Activation::Kind(act), threshold},
                      {Activation::Kind(up_act), up_threshold},
                      least.typed_data()[0]};
  const std::vector<int32_t> valid = valid_rows(n_valid, rows);
  if (static_cast<int64_t>(valid.size()) < rows) {
    std::fill_n(y->typed_data(), y->element_count(), 0.0f);
    std::fill_n(kept->typed_data(), rows, 0);
    std::fill_n(nonzero->typed_data(), rows, 0);
  }
  SparseCounts counts{kept->typed_data(), nonzero->typed_data()};
  sparse_ffn(ffn, x.typed_data(), keep.typed_data(), optional(residual), valid, y->typed_data(), &counts);
  read->typed_data()[0] = counts.read, active->typed_data()[0] = counts.active;
  return ffi::Error::Success();
}

constexpr int64_t kSignNeurons = 256;  // of one item

// keep[r, j] = (columns in which x_r and neuron j have the same sign) >= threshold.
ffi::Error signbit_keep(ffi::Buffer<ffi::F32> x, ffi::AnyBuffer signs, ffi::Buffer<ffi::S32> n_valid,
                        ffi::Buffer<ffi::F32> threshold, ffi::ResultBuffer<ffi::U8> keep) {
  const int64_t rows = x.dimensions()[0], cols = x.dimensions()[1], words = (cols + 63) / 64;
  const int64_t neurons = keep->dimensions()[1];
  if (static_cast<int64_t>(signs.size_bytes()) != neurons * words * 8)
    return ffi::Error::InvalidArgument("specsparse signbit_keep: the sign bits do not fit");
  const std::vector<int32_t> valid = valid_rows(n_valid, rows);
  const int64_t count = valid.size();
  thread_local std::vector<uint64_t> packed;
  packed.resize(count * words);
  for (int64_t t = 0; t < count; ++t) pack_signs_of(x.typed_data() + valid[t] * cols, cols, packed.data() + t * words);
  uint8_t* out = keep->typed_data();
  if (count < rows) std::fill_n(out, rows * neurons, uint8_t{0});
  const uint64_t* mine = packed.data();
  const uint64_t* all = static_cast<const uint64_t*>(signs.untyped_data());
  const float least = threshold.typed_data()[0];
  parallel((neurons + kSignNeurons - 1) / kSignNeurons, [&](int64_t item) {
    const auto differing = sparse_ops().differing;
    for (int64_t j = item * kSignNeurons; j < std::min(neurons, (item + 1) * kSignNeurons); ++j)
      for (int64_t t = 0; t < count; ++t)
        out[valid[t] * neurons + j] =
            static_cast<float>(cols - differing(mine + t * words, all + j * words, words)) >= least;
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_sparse_ffn, sparse_ffn_call,
                              (results<Floats, Ints32, Ints32, Ints32, Ints32>(
                                   args<Floats, Bytes8, AnyBuffer, AnyBuffer, AnyBuffer, Floats, Floats, Ints32, Floats>())
                                   .Attr<Ints>("matrices").Attr<int64_t>("act").Attr<float>("threshold")
                                   .Attr<int64_t>("up_act").Attr<float>("up_threshold").Attr<float>("eps")));

XLA_FFI_DEFINE_HANDLER_SYMBOL(specsparse_signbit_keep, signbit_keep,
                              (results<Bytes8>(args<Floats, AnyBuffer, Ints32, Floats>())));

#pragma GCC visibility pop

}  // namespace specsparse
