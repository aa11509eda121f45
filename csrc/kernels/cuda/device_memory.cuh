// How kernels reach memory, and which warp and lane a thread is.
#pragma once

#include "kernels/cuda/slice_table.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "ddp_hooks needs GPUs of compute capability 7.0 or later"
#endif

namespace ddp_hooks::cuda {

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

}  // namespace ddp_hooks::cuda
