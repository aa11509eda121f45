#include <cuda_runtime_api.h>

#include "kernels/cuda/stream.h"

namespace ddp_hooks::cuda {

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // or somebody else's next check would find it
  // The legacy default stream may not be asked while a stream that waits for it is captured.
  return error == cudaErrorStreamCaptureImplicit;
}

}  // namespace ddp_hooks::cuda
