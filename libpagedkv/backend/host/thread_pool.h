// The threads of the host kernels: one pool for the process, started at its first use, asleep when idle.
//
// A caller works along with the threads. One job runs at a time; a second caller meanwhile does its job alone. In the
// child of a fork the pool is new and empty. Nothing here allocates once the threads run.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace pkv {

// Runs task(context, 0) to task(context, num_tasks - 1), each once, in any order and on any thread, and returns when
// all are done. Tasks must neither throw nor call this.
void run_parallel(int64_t num_tasks, void (*task)(void *context, int64_t index), void *context);

// run_parallel for a callable f(int64_t index).
template <class F>
void run_parallel(int64_t num_tasks, F &f) {
  run_parallel(
      num_tasks, [](void *context, int64_t index) { (*static_cast<F *>(context))(index); }, &f);
}

}  // namespace pkv
