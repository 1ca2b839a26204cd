// The threads of the host kernels: one pool for the process, started at its first use, asleep when idle.
//
// A caller works along with the threads. One job runs at a time; a second caller meanwhile does its job alone. In the
// child of a fork the pool is new and empty. Nothing here allocates once the threads run.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace pkv {

// Runs task(context, index, worker) once for each index below num_tasks, in any order, on up to num_threads threads,
// and returns when all are done. `worker` is a number below num_threads that no two tasks have at the same time. Tasks
// must neither throw nor call this.
void run_parallel(int64_t num_tasks, int32_t num_threads, void (*task)(void *context, int64_t index, int32_t worker),
                  void *context);

// The same for a callable f(index, worker).
template <class F>
void run_parallel(int64_t num_tasks, int32_t num_threads, F &f) {
  run_parallel(
      num_tasks, num_threads,
      [](void *context, int64_t index, int32_t worker) { (*static_cast<F *>(context))(index, worker); }, &f);
}

}  // namespace pkv
