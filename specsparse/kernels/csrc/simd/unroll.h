// Loops whose index is a compile-time constant, so that small arrays of vectors live in registers.
#pragma once

#include <type_traits>
#include <utility>

// Inlined whatever GCC thinks of the size: a call inside a loop of vectors sends all of them through the stack.
#define SPECSPARSE_INLINE inline __attribute__((always_inline))
#define SPECSPARSE_EACH __attribute__((always_inline))  // between the parameters and the body of a lambda

namespace specsparse {

template <class F, int... I>
SPECSPARSE_INLINE void each_of(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>{}), ...);
}

// f(0), f(1), ..., f(N - 1), where f is [&](auto i) SPECSPARSE_EACH { ... }.
template <int N, class F>
SPECSPARSE_INLINE void each(F&& f) {
  each_of(std::make_integer_sequence<int, N>{}, f);
}

}  // namespace specsparse
