#include "simd/amx.h"

#include <cerrno>
#include <cstring>
#include <string>

#include "simd/trial.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specsparse {
namespace {

std::string ask() {
#if !defined(SPECSPARSE_AMX)
  return "this build has no AMX kernels";
#elif defined(__x86_64__) && defined(__linux__) && defined(SYS_arch_prctl)
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;  // of EDX
  constexpr unsigned kOsXsave = 1u << 27;                 // of ECX
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kTile | kInt8)) != (kTile | kInt8)) return "the processor has no AMX";
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsXsave)) return "the system keeps no extended registers";
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return "the system keeps no tiles";
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequest, kTileData)) return std::string("the kernel refuses tiles: ") + std::strerror(errno);
  if (const char* fault = fault_of(amx_ops(), kAvx512Ops)) return std::string("products by tiles: ") + fault;
  return "";
#else
  return "tiles are asked for on Linux on x86-64 only";
#endif
}

}  // namespace

const char* why_no_amx() {
  static const std::string reason = ask();
  return reason.empty() ? nullptr : reason.c_str();
}

}  // namespace specsparse
