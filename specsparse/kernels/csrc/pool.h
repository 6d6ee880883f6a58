// A pool of worker threads that spin briefly between jobs and then sleep.
//
// A job is a number of items handed out by an atomic counter. The caller works too, and when the items run out it waits only
// for workers that have joined the job: a worker that the scheduler has put aside between jobs costs nothing.
#pragma once

#include <cstdint>

namespace specsparse {

using ItemFn = void (*)(void* context, int64_t item, int worker);

// Runs fn(context, item, worker) for every item in [0, items). `worker` is in [0, threads()). Items must be independent:
// which thread runs one is not defined. Nested or concurrent calls run on the calling thread.
void parallel_for(int64_t items, ItemFn fn, void* context);

template <class F>
void parallel(int64_t items, F&& body) {
  parallel_for(items, [](void* c, int64_t item, int worker) { (*static_cast<F*>(c))(item, worker); }, &body);
}

int threads();
void set_threads(int count);  // 1 .. kMaxThreads

constexpr int kMaxThreads = 64;

}  // namespace specsparse
