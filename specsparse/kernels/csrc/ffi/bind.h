// Operands and results of XLA's FFI handlers in one line each.
#pragma once

#include <utility>

#include "xla/ffi/api/ffi.h"

namespace specsparse {

using Floats = xla::ffi::Buffer<xla::ffi::F32>;
using Ints32 = xla::ffi::Buffer<xla::ffi::S32>;
using Bytes8 = xla::ffi::Buffer<xla::ffi::U8>;
using AnyBuffer = xla::ffi::AnyBuffer;

// `binding` and further operands of these types, in order.
template <class First, class... Rest, class Binding>
auto more_args(Binding&& binding) {
  if constexpr (sizeof...(Rest) == 0) {
    return std::move(binding).template Arg<First>();
  } else {
    return more_args<Rest...>(std::move(binding).template Arg<First>());
  }
}

// A binding whose first operands have these types, in order.
template <class... Types>
auto args() {
  return more_args<Types...>(xla::ffi::Ffi::Bind());
}

// `binding` and results of these types, in order.
template <class First, class... Rest, class Binding>
auto results(Binding&& binding) {
  if constexpr (sizeof...(Rest) == 0) {
    return std::move(binding).template Ret<First>();
  } else {
    return results<Rest...>(std::move(binding).template Ret<First>());
  }
}

}  // namespace specsparse
