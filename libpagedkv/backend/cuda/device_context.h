// The primary context of a device, and making it current for the length of a scope.
//
// The runtime's own cudaSetDevice cannot be undone: setting the device that a thread had before would create a context
// there, with some hundred megabytes, if the thread never used it. Pushing a context and popping it leaves no trace.
// The driver's functions come through the runtime, so that libcuda is not linked. In the child of a process that used CUDA
// before it forked nothing is called: the driver does not survive a fork.
#pragma once

#include <cuda.h>

#include "base/status.h"

namespace pkv {

// Whether CUDA was used by an ancestor of this process, so that this one cannot. Notes the first use: to be asked before
// anything else of CUDA is called.
bool is_cuda_lost();

// Retains the primary context of a device, for good. The runtime uses the same one.
Status retain_context(int ordinal, CUcontext *out);

// Makes a context current in the calling thread until the end of the scope.
class ContextScope {
 public:
  explicit ContextScope(CUcontext context);
  ~ContextScope();
  ContextScope(const ContextScope &) = delete;
  ContextScope &operator=(const ContextScope &) = delete;

  // DEVICE_ERROR if the context could not be made current, or the process is the child of a fork.
  Status status() const;

 private:
  CUresult result_;
};

}  // namespace pkv
