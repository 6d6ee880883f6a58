// Products of a table tried before the table is used.
#pragma once

#include "simd/ops.h"

namespace specsparse {

// null where `dot` of `tried` gives the bits of `known`'s for blocks of every kind and 1 to kMostTile rows; else one line on what
// happened. The products run in a process of their own: a fault ends that one.
const char* fault_of(const Ops& tried, const Ops& known);

}  // namespace specsparse
