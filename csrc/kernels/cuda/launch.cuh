// What all kernels share: how they reach memory, which chunk or portion is whose, and how they are launched.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/slice_table.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "ddp_hooks needs GPUs of compute capability 7.0 or later: leave older ones out of TORCH_CUDA_ARCH_LIST"
#endif

namespace ddp_hooks::cuda {

constexpr int kBlockThreads = kWarpsPerBlock * kWarpLanes;
constexpr unsigned kWholeWarp = 0xffffffffu;

struct DeviceMemory {
  template <typename T>
  __device__ __forceinline__ T load(const char* from) const {
    return *reinterpret_cast<const T*>(from);
  }
  template <typename T>
  __device__ __forceinline__ void store(char* to, const T& value) const {
    *reinterpret_cast<T*>(to) = value;
  }
};

__device__ __forceinline__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % kWarpLanes;
}

// The same for all lanes of a warp.
__device__ __forceinline__ int64_t warp_of_grid() {
  return static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + static_cast<int>(threadIdx.x) / kWarpLanes;
}

inline const char* why_failed(cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();  // or somebody else's next check would find it
  return cudaGetErrorString(status);
}

// Launches a kernel with so many warps, or a few more, in blocks of kWarpsPerBlock.
template <typename... Parameters>
const char* launch_warps(void (*kernel)(Parameters...), int64_t warps, void** arguments, cudaStream_t stream) {
  const int64_t blocks = (warps + kWarpsPerBlock - 1) / kWarpsPerBlock;
  return why_failed(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                                     dim3(kBlockThreads), arguments, 0, stream));
}

// One warp for each chunk of the table, which is the kernel's first parameter.
template <int kCapacity, typename... Parameters>
const char* launch_over_chunks(void (*kernel)(SliceTable<kCapacity>, Parameters...), SliceTable<kCapacity>& table,
                               cudaStream_t stream, Parameters... parameters) {
  void* arguments[] = {&table, &parameters...};
  return launch_warps(kernel, chunk_count(table), arguments, stream);
}

}  // namespace ddp_hooks::cuda
