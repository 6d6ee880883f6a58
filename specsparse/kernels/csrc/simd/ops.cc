#include "simd/ops.h"

#include <cstdlib>
#include <cstring>

namespace specsparse {
namespace {

bool supported(const Ops& table) {
  if (&table == &kPortableOps) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (&table == &kAvx2Ops) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

constexpr const Ops* kTables[] = {
#if defined(__x86_64__)
    &kAvx512Ops, &kAvx2Ops,
#endif
    &kPortableOps};

const Ops* find(const char* name) {
  for (const Ops* table : kTables)
    if ((!name || !std::strcmp(name, table->name)) && supported(*table)) return table;
  return nullptr;
}

const Ops*& current() {
  static const Ops* table = find(nullptr);
  return table;
}

}  // namespace

const Ops& ops() { return *current(); }

bool set_ops(const char* name) {
  const Ops* table = find(name);
  if (table) current() = table;
  return table != nullptr;
}

}  // namespace specsparse
