#include "simd/ops.h"

#include <cstring>
#include <deque>

#include "simd/amx.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace specsparse {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

#if defined(SPECSPARSE_AVXVNNI)
bool has_avxvnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

Ops avxvnni_ops(decltype(Ops::dot) dot, decltype(Ops::dot_groups) dot_groups) {
  Ops table = kAvx2Ops;
  table.name = "avxvnni", table.dot = dot, table.dot_groups = dot_groups;
  return table;
}
#endif

// Widest first. Not moved when one is added.
std::deque<Ops> find_tables() {
  std::deque<Ops> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(SPECSPARSE_AMX)
  if (has_avx512() && !why_no_amx()) found.push_back(amx_ops());
#endif
  if (has_avx512()) found.push_back(kAvx512Ops);
#if defined(SPECSPARSE_AVXVNNI)
  if (has_avxvnni())
    found.push_back(avxvnni_ops(dot_avxvnni, dot_groups_avxvnni));
  else if (has_avx512())
    found.push_back(avxvnni_ops(dot_vnni256, dot_groups_vnni256));
#endif
  if (has_avx2()) found.push_back(kAvx2Ops);
#endif
  found.push_back(kPortableOps);
  return found;
}

std::deque<Ops>& tables() {
  static auto* all = new std::deque<Ops>(find_tables());  // never destroyed: workers outlive main
  return *all;
}

const Ops*& current() {
  static const Ops* table = &tables().front();
  return table;
}

}  // namespace

const Ops& ops() { return *current(); }

bool set_ops(const char* name) {
  for (const Ops& table : tables())
    if (!std::strcmp(name, table.name)) return current() = &table, true;
  return false;
}

bool add_ops(void (*make)(const Ops* avx512, Ops* table)) {
#if defined(__x86_64__)
  if (!has_avx512()) return false;
  Ops table;
  make(&kAvx512Ops, &table);
  tables().push_back(table);
  return true;
#else
  return false;
#endif
}

}  // namespace specsparse
