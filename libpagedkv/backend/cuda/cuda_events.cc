// Streams by their ids, and events between them. The events measure no time, which makes them cheap.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/device_context.h"

namespace pkv {

Status CudaBackend::stream_id(pkv_stream stream, uint64_t *out) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  unsigned long long id = 0;
  PKV_TRY_CUDA(cudaStreamGetId(static_cast<cudaStream_t>(stream), &id));
  *out = id;
  return PKV_OK;
}

Status CudaBackend::create_event(DeviceEvent *out) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  cudaEvent_t event = nullptr;
  PKV_TRY_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  *out = event;
  return PKV_OK;
}

void CudaBackend::destroy_event(DeviceEvent event) {
  if (event == nullptr) return;
  const ContextScope scope(context_);
  if (scope.status() != PKV_OK) return;
  cudaEventDestroy(static_cast<cudaEvent_t>(event));  // one that is not reached yet lives on until it is
  cudaGetLastError();
}

Status CudaBackend::record_event(DeviceEvent event, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  PKV_TRY_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
  return PKV_OK;
}

Status CudaBackend::wait_event(DeviceEvent event, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  PKV_TRY_CUDA(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
  return PKV_OK;
}

bool CudaBackend::is_event_done(DeviceEvent event) {
  const ContextScope scope(context_);
  if (scope.status() != PKV_OK) return false;
  const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
  if (error == cudaSuccess) return true;
  cudaGetLastError();  // "not ready" is no error to leave behind
  return false;
}

}  // namespace pkv
