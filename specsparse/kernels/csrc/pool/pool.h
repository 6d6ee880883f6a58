// A pool of worker threads that spin briefly between jobs and then sleep.
//
// A job is a sequence of phases, each a number of items; a phase begins when the one before it is complete. Every thread has a
// contiguous share of the items and helps with the others' when its own is done. The caller works too. Nobody waits for a
// thread that holds no item: a worker that the scheduler has put aside costs nothing.
#pragma once

#include <cstdint>

namespace specsparse {

// Items of one phase must be independent: which thread runs one is not defined. A phase of one item runs on the thread that
// completed the phase before it, so it costs no hand-over.
class Phases {
 public:
  virtual int count() const = 0;
  virtual int64_t items(int phase) const = 0;
  virtual void run(int phase, int64_t item) = 0;
  // Called once by thread `self` of `threads` that finds no item of `phase` left: time to fetch what its share of a later
  // phase reads.
  virtual void idle(int /*phase*/, int /*self*/, int /*threads*/) {}

 protected:
  ~Phases() = default;
};

// The first item of thread `self`'s share of `items`.
inline int64_t share_begin(int64_t items, int self, int threads) { return items * self / threads; }

// Runs every item of every phase. Nested or concurrent calls run on the calling thread.
void run_phases(Phases& job);

// Runs body(item) for every item in [0, items).
template <class F>
void parallel(int64_t items, F&& body) {
  struct Job final : Phases {
    int64_t n;
    F& f;
    Job(int64_t n, F& f) : n(n), f(f) {}
    int count() const override { return 1; }
    int64_t items(int) const override { return n; }
    void run(int, int64_t item) override { f(item); }
  } job(items, body);
  run_phases(job);
}

// Runs first(item) for every item in [0, firsts), and then second(item) for every item in [0, seconds).
template <class F, class G>
void parallel(int64_t firsts, F&& first, int64_t seconds, G&& second) {
  struct Job final : Phases {
    int64_t firsts, seconds;
    F& first;
    G& second;
    Job(int64_t firsts, F& first, int64_t seconds, G& second) : firsts(firsts), seconds(seconds), first(first), second(second) {}
    int count() const override { return 2; }
    int64_t items(int phase) const override { return phase ? seconds : firsts; }
    void run(int phase, int64_t item) override { phase ? second(item) : first(item); }
  } job(firsts, first, seconds, second);
  run_phases(job);
}

int threads();
void set_threads(int count);  // 1 .. kMaxThreads

constexpr int kMaxThreads = 1024;

}  // namespace specsparse
