// Operands and results of XLA's FFI handlers in one line each.
#pragma once

#include <utility>

#include "xla/ffi/api/ffi.h"

namespace specsparse {

using Floats = xla::ffi::Buffer<xla::ffi::F32>;
using Ints32 = xla::ffi::Buffer<xla::ffi::S32>;
using Bytes8 = xla::ffi::Buffer<xla::ffi::U8>;
using AnyBuffer = xla::ffi::AnyBuffer;

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
