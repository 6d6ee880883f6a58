// Operands and results of XLA's FFI handlers in one line each. Its headers take long to compile: nothing else includes them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "dense/descriptor.h"
#include "xla/ffi/api/ffi.h"

namespace specsparse {

using Floats = xla::ffi::Buffer<xla::ffi::F32>;
using Ints32 = xla::ffi::Buffer<xla::ffi::S32>;
using Bytes8 = xla::ffi::Buffer<xla::ffi::U8>;
using AnyBuffer = xla::ffi::AnyBuffer;
using Ints = xla::ffi::Span<const int64_t>;

// The records that a call's integers hold.
template <class Record>
xla::ffi::Span<const Record> records(Ints all) {
  return {reinterpret_cast<const Record*>(all.begin()), all.size() * sizeof(int64_t) / sizeof(Record)};
}

// Reads the matrix at a place of a list, with its bytes; false if they do not fit.
template <class Matrix>
bool read_matrix(Ints matrices, size_t place, const AnyBuffer& data, Matrix* out) {
  const auto all = records<MatrixDescriptor>(matrices);
  return place < all.size() && out->read(all[place], data.untyped_data(), data.size_bytes());
}

// The numbers of an operand, null if it is empty.
inline const float* floats(const AnyBuffer& x) {
  return x.element_count() ? static_cast<const float*>(x.untyped_data()) : nullptr;
}

// The rows that count: i < n_valid[b] of each sequence.
inline std::vector<int32_t> valid_rows(const Ints32& n_valid, int64_t rows) {
  const int64_t batch = n_valid.element_count(), n = batch ? rows / batch : 0;
  std::vector<int32_t> out;
  out.reserve(rows);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t count = std::clamp<int64_t>(n_valid.typed_data()[b], 0, n);
    for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<int32_t>(b * n + i));
  }
  return out;
}

// `binding` and further operands, or results, of these types, in order.
template <bool RESULTS, class First, class... Rest, class Binding>
auto with(Binding&& binding) {
  auto add = [&] {
    if constexpr (RESULTS)
      return std::move(binding).template Ret<First>();
    else
      return std::move(binding).template Arg<First>();
  };
  if constexpr (sizeof...(Rest) == 0)
    return add();
  else
    return with<RESULTS, Rest...>(add());
}

// A binding whose first operands have these types.
template <class... Types>
auto args() {
  return with<false, Types...>(xla::ffi::Ffi::Bind());
}

// `binding` and results of these types.
template <class... Types, class Binding>
auto results(Binding&& binding) {
  return with<true, Types...>(std::move(binding));
}

}  // namespace specsparse
