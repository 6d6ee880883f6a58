#include "pool/pool.h"

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
#include <system_error>
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

// The gate of the current job: a closed flag and the number of workers inside.
constexpr uint32_t kClosed = 1u << 31;

struct Pool {
  std::atomic<bool> busy{false};  // one job at a time; a job that runs another one finds it so, as other callers do
  std::atomic<int> count{1};
  int started = 1;
  int64_t spin_ns;

  Phases* job = nullptr;
  int phases = 0;
  int limit = 1;  // workers with a larger index stay out
  // Each thread has a contiguous share of a phase's items, so that it reads memory in one stream; a thread that is through
  // with its own takes from the others'.
  struct alignas(64) Share {
    std::atomic<uint64_t> next{0};  // phase in the high half, item in the low
  };
  Share shares[kMaxThreads];
  alignas(64) std::atomic<int64_t> done{0};   // items of the current phase
  alignas(64) std::atomic<uint32_t> gate{kClosed};
  alignas(64) std::atomic<uint32_t> position{0};  // bumped when a phase begins and when a job ends; what waiting threads watch
  std::atomic<uint32_t> left{0};                  // bumped by the last worker out, for a caller that sleeps
  std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};

  Pool() {
    const char* spin = std::getenv("SPECSPARSE_SPIN_US");
    spin_ns = (spin ? std::max(0L, std::atol(spin)) : 50) * 1000;
    count = std::clamp<int>(std::thread::hardware_concurrency(), 1, kMaxThreads);
  }

  void start_workers() {
    try {
      for (; started < count; ++started) std::thread([this, i = started] { work(i); }).detach();
    } catch (const std::system_error&) {
      count = started;  // a container's limit of processes: those that run share the work
    }
  }

  static uint64_t ticket(int phase, int64_t item) { return static_cast<uint64_t>(phase) << 32 | item; }

  // Begins the first phase after `phase` that has more than one item; those with one run here. Only the thread that
  // completed `phase` calls it.
  void advance(int phase) {
    int64_t items = 0;
    for (++phase; phase < phases && (items = job->items(phase)) < 2; ++phase)
      if (items) job->run(phase, 0);
    done.store(0, std::memory_order_relaxed);
    for (int t = 0; t < limit; ++t)
      shares[t].next.store(ticket(phase, phase < phases ? share_begin(items, t, limit) : 0), std::memory_order_release);
    position.fetch_add(1);
    if (sleepers.load()) futex_wake(&position);
  }

  // Takes items until none is left of the phase that is open, and opens the next one if this thread's was the last. False
  // once the job is complete. While a thread holds items it has not reported, the phase they belong to stays open.
  bool take_items(int self) {
    for (;;) {
      int64_t taken = 0, items = 0;
      int phase = 0;
      for (int i = 0; i < limit; ++i) {
        const int owner = (self + i) % limit;
        for (;;) {
          const uint64_t got = shares[owner].next.fetch_add(1, std::memory_order_acquire);
          const int64_t item = got & 0xffffffff;
          const int of = static_cast<int>(got >> 32);
          if (of >= phases) return false;
          const int64_t all = job->items(of);
          if (item >= share_begin(all, owner + 1, limit)) {
            if (!taken) phase = of;
            break;
          }
          phase = of, items = all;
          job->run(phase, item);
          ++taken;
        }
      }
      if (!taken || done.fetch_add(taken, std::memory_order_acq_rel) + taken != items) {
        job->idle(phase, self, limit);
        return true;
      }
      advance(phase);
    }
  }

  // Spins until ready() or the spin time is over; whether it became true.
  template <class Ready>
  bool spin(Ready ready) {
    for (int i = 0; i < 256; ++i) {
      if (ready()) return true;
      relax();
    }
    for (int64_t until = now_ns() + spin_ns;;) {
      for (int i = 0; i < 64; ++i) {
        if (ready()) return true;
        relax();
      }
      if (now_ns() > until) return ready();
    }
  }

  void wait_beyond(uint32_t seen) {
    if (spin([&] { return position.load(std::memory_order_acquire) != seen; })) return;
    sleepers.fetch_add(1);
    while (position.load() == seen) futex_wait(&position, seen);
    sleepers.fetch_sub(1);
  }

  // A worker is inside the gate only while it looks for items, never while it waits.
  void work(int index) {
    const FlushSubnormals mode;
    for (uint32_t seen = 0;;) {
      wait_beyond(seen);
      seen = position.load(std::memory_order_acquire);
      if (!enter()) continue;
      if (index < limit) take_items(index);
      const uint32_t before = gate.fetch_sub(1, std::memory_order_acq_rel);
      if (before == (kClosed | 1)) {
        left.fetch_add(1);
        if (caller_sleeps.load()) futex_wake(&left);
      }
    }
  }

  bool enter() {
    uint32_t g = gate.load(std::memory_order_acquire);
    do {
      if (g & kClosed) return false;
    } while (!gate.compare_exchange_weak(g, g + 1, std::memory_order_acq_rel));
    return true;
  }

  void close() {
    if (gate.fetch_or(kClosed) == 0) return;
    auto empty = [&] { return gate.load(std::memory_order_acquire) == kClosed; };
    if (spin(empty)) return;
    caller_sleeps.store(true);
    for (uint32_t seen = left.load(); !empty(); seen = left.load()) futex_wait(&left, seen);
    caller_sleeps.store(false);
  }

  void run(Phases& wanted) {
    const FlushSubnormals mode;
    const bool alone = count == 1 || (wanted.count() == 1 && wanted.items(0) < 2);
    if (alone || busy.exchange(true, std::memory_order_acquire)) {
      for (int phase = 0; phase < wanted.count(); ++phase)
        for (int64_t i = 0, n = wanted.items(phase); i < n; ++i) wanted.run(phase, i);
      return;
    }
    start_workers();
    job = &wanted, phases = wanted.count(), limit = count;
    // Nothing to take until the first phase is open.
    for (int t = 0; t < limit; ++t) shares[t].next.store(ticket(0, int64_t{1} << 30), std::memory_order_relaxed);
    gate.store(0, std::memory_order_release);
    advance(-1);
    for (uint32_t seen = position.load(); take_items(0); seen = position.load()) wait_beyond(seen);
    close();
    busy.store(false, std::memory_order_release);
  }
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: workers outlive main
  return *instance;
}

}  // namespace

void run_phases(Phases& job) { pool().run(job); }

int threads() { return pool().count; }

void set_threads(int count) {
  Pool& p = pool();
  while (p.busy.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
  p.count = std::clamp(count, 1, kMaxThreads);
  p.busy.store(false, std::memory_order_release);
}

}  // namespace specsparse
