// Blocks of one device copied to another. Where one can reach the other's memory the copies go over their link without the
// host; CUDA goes through the host by itself where not.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/device_context.h"

namespace pkv {

// Asking again is cheap, and others in the process may have done so already. That it is not to be had is no error.
void CudaBackend::enable_peer_access(const CudaBackend &peer) {
  int is_possible = 0;
  if (cudaDeviceCanAccessPeer(&is_possible, ordinal_, peer.ordinal_) == cudaSuccess && is_possible != 0) {
    cudaDeviceEnablePeerAccess(peer.ordinal_, 0);
  }
  cudaGetLastError();
}

Status CudaBackend::copy_from_peer(Backend *source, const PeerCopyParams &params) {
  const CudaBackend &peer = static_cast<const CudaBackend &>(*source);
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  if (peer.ordinal_ != ordinal_) enable_peer_access(peer);
  for (int64_t i = 0; i < params.count;) {
    // Neighbours that stay neighbours travel together.
    int64_t end = i + 1;
    while (end < params.count && params.sources[end] == params.sources[end - 1] + 1 &&
           params.destinations[end] == params.destinations[end - 1] + 1) {
      ++end;
    }
    const uint64_t bytes = static_cast<uint64_t>(end - i) * params.block_bytes;
    void *to = static_cast<char *>(params.base) + static_cast<uint64_t>(params.destinations[i]) * params.block_bytes;
    const void *from =
        static_cast<const char *>(params.source_base) + static_cast<uint64_t>(params.sources[i]) * params.block_bytes;
    if (peer.ordinal_ == ordinal_) {
      PKV_TRY_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, upload_stream_));
    } else {
      PKV_TRY_CUDA(cudaMemcpyPeerAsync(to, ordinal_, from, peer.ordinal_, bytes, upload_stream_));
    }
    i = end;
  }
  PKV_TRY_CUDA(cudaStreamSynchronize(upload_stream_));
  return PKV_OK;
}

}  // namespace pkv
