#include "simd/trial.h"

#include <cerrno>
#include <csignal>
#include <cstring>

#include "simd/kinds.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace specsparse {
namespace {

constexpr int kLongestMs = 10000;  // a trial takes a few
constexpr int64_t kColumns = kSuper + kBlock * 8, kBlocks = kColumns / kBlock;
constexpr int64_t kMostBytes = kBlocks * (128 + kRows * kBlock) + 4 * kColumns;

struct Numbers {
  uint32_t state = 1;
  uint8_t next() { return static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24); }
};

// One group of rows, and rows of activations. Static, since a child of a process with threads must not allocate.
struct alignas(64) Made {
  QBlock rows[kMostTile * kBlocks];
  uint8_t group[2 * kMostBytes];  // kernels fetch what follows
  int8_t lut[16];
  float want[kMostTile * kRows], got[kMostTile * kRows];
};

void fill(Made& made) {
  Numbers numbers;
  for (QBlock& block : made.rows) {
    block.scale = static_cast<float>(1 + numbers.next()) / 4096;
    block.sum = 0;
    for (int half = 0; half < 2; ++half) {
      int32_t sum = 0;
      for (int i = 0; i < kBlock / 2; ++i) {
        const int8_t q = static_cast<int8_t>(numbers.next() % 255 - 127);
        block.q[half * kBlock / 2 + i] = q, sum += q;
      }
      block.shifts[half] = block.scale * static_cast<float>(sum), block.less[1 + half] = -128 * sum, block.sum += sum;
    }
    block.shift = block.scale * static_cast<float>(block.sum), block.less[0] = -128 * block.sum;
  }
  // Without this bit every half and every float is finite, wherever scales lie.
  for (int64_t i = 0; i < static_cast<int64_t>(sizeof made.group); ++i)
    made.group[i] = static_cast<uint8_t>(numbers.next() & (i % 2 ? 0xBF : 0xFF));
  for (int8_t& value : made.lut) value = static_cast<int8_t>(numbers.next());
}

bool same_products(const Ops& tried, const Ops& known) {
  static Made made;
  fill(made);
  const Activations x{kColumns, kBlocks, nullptr, made.rows, kMostTile};
  bool same = true;
  const auto compare = [&](Read read, Scales scales, int subs) {
    const Codes codes = read == Read::kInt8 ? Codes::kInt8 : Codes::kNibble;
    const int32_t zero = read == Read::kCodes && scales == Scales::kD ? 8 : 0;
    const Matrix w{made.group, kRows, kColumns, kMostBytes, codes, scales, kBlock / subs, zero,
                   read == Read::kTable ? made.lut : nullptr};
    for (int tokens = 1; tokens <= kMostTile; ++tokens) {
      known.dot(w, 0, x, 0, tokens, made.want);
      tried.dot(w, 0, x, 0, tokens, made.got);
      same &= !std::memcmp(made.want, made.got, sizeof(float) * kRows * tokens);
    }
  };
#define SPECSPARSE_KIND(READ, SCALES, SUBS) compare(Read::READ, Scales::SCALES, SUBS);
  SPECSPARSE_KINDS(SPECSPARSE_KIND)
#undef SPECSPARSE_KIND
  if (tried.leave) tried.leave();
  return same;
}

}  // namespace

const char* fault_of(const Ops& tried, const Ops& known) {
#if defined(__linux__)
  // The first touch of this library's thread-local memory allocates it: here, not in the child, which must not allocate.
  if (tried.leave) tried.leave();
  const long child = syscall(SYS_clone, 0L, nullptr, nullptr, nullptr, nullptr);  // sends no signal at its end
  if (child < 0) return "no process could be made to try them";
  if (!child) {
    for (const int fault : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP, SIGABRT}) std::signal(fault, SIG_DFL);
    _exit(same_products(tried, known) ? 0 : 1);
  }
  int status = 0;
  for (int waited_ms = 0;; ++waited_ms) {
    const pid_t ended = waitpid(static_cast<pid_t>(child), &status, __WALL | WNOHANG);
    if (ended == child) break;
    if (ended < 0 && errno != EINTR) return "the process that tried them was lost";
    if (waited_ms == kLongestMs) {
      kill(static_cast<pid_t>(child), SIGKILL);
      while (waitpid(static_cast<pid_t>(child), &status, __WALL) < 0 && errno == EINTR) {
      }
      return "a trial of them did not end";
    }
    usleep(1000);
  }
  if (!WIFEXITED(status)) return "a trial of them faulted";
  return WEXITSTATUS(status) ? "a trial of them gave other bits" : nullptr;
#else
  return same_products(tried, known) ? nullptr : "a trial of them gave other bits";
#endif
}

}  // namespace specsparse
