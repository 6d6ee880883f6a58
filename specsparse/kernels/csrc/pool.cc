#include "pool.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace specsparse {
namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// XLA's threads flush subnormals to zero; ours must, or a result would depend on the thread that computed it. The caller's
// own mode is restored.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, kMaxThreads, nullptr, nullptr, 0);
}

// The gate of the current job: epoch in the high half, a closed flag, and the number of workers inside.
constexpr uint64_t kClosed = 1ull << 31;
constexpr uint64_t kCount = kClosed - 1;

struct Pool {
  std::mutex mutex;  // one job at a time; grows the pool
  int count = 1;
  int started = 1;
  int64_t spin_ns;

  ItemFn fn = nullptr;
  void* context = nullptr;
  int64_t items = 0;
  int limit = 1;  // workers with a larger index stay out
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint64_t> gate{kClosed};
  alignas(64) std::atomic<uint32_t> epoch{0};
  std::atomic<uint32_t> left{0};  // bumped by the last worker out, for a caller that sleeps
  std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};

  Pool() {
    const char* spin = std::getenv("SPECSPARSE_SPIN_US");
    spin_ns = (spin ? std::max(0L, std::atol(spin)) : 50) * 1000;
    count = std::clamp<int>(std::thread::hardware_concurrency(), 1, kMaxThreads);
  }

  void start_workers() {
    for (; started < count; ++started) std::thread([this, i = started] { work(i); }).detach();
  }

  void take_items(int worker) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) fn(context, i, worker);
  }

  // Spins until done() or the spin time is over; whether it became true.
  template <class Done>
  bool spin(Done done) {
    for (int64_t until = now_ns() + spin_ns;;) {
      for (int i = 0; i < 64; ++i) {
        if (done()) return true;
        relax();
      }
      if (now_ns() > until) return done();
    }
  }

  void work(int index) {
    const FlushSubnormals mode;
    for (uint32_t seen = 0;;) {
      if (!spin([&] { return epoch.load(std::memory_order_acquire) != seen; })) {
        sleepers.fetch_add(1);
        while (epoch.load() == seen) futex_wait(&epoch, seen);
        sleepers.fetch_sub(1);
      }
      seen = epoch.load(std::memory_order_acquire);
      join(index);
    }
  }

  void join(int index) {
    uint64_t g = gate.load(std::memory_order_acquire);
    do {
      if (g & kClosed) return;
    } while (!gate.compare_exchange_weak(g, g + 1, std::memory_order_acq_rel));
    if (index < limit) take_items(index);
    const uint64_t before = gate.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kClosed) && (before & kCount) == 1) {
      left.fetch_add(1);
      if (caller_sleeps.load()) futex_wake(&left);
    }
  }

  void run(int64_t n, ItemFn f, void* c) {
    const FlushSubnormals mode;
    std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    if (!lock.owns_lock() || n < 2 || count == 1) {
      for (int64_t i = 0; i < n; ++i) f(c, i, 0);
      return;
    }
    start_workers();
    fn = f, context = c, items = n, limit = count;
    next.store(0, std::memory_order_relaxed);
    gate.store(0, std::memory_order_release);
    epoch.fetch_add(1);
    if (sleepers.load()) futex_wake(&epoch);
    take_items(0);
    if ((gate.fetch_or(kClosed) & kCount) == 0) return;
    auto empty = [&] { return (gate.load(std::memory_order_acquire) & kCount) == 0; };
    if (spin(empty)) return;
    caller_sleeps.store(true);
    for (uint32_t seen = left.load(); !empty(); seen = left.load()) futex_wait(&left, seen);
    caller_sleeps.store(false);
  }
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: workers outlive main
  return *instance;
}

}  // namespace

void parallel_for(int64_t items, ItemFn fn, void* context) { pool().run(items, fn, context); }

int threads() { return pool().count; }

void set_threads(int count) {
  std::lock_guard<std::mutex> lock(pool().mutex);
  pool().count = std::clamp(count, 1, kMaxThreads);
}

}  // namespace specsparse
