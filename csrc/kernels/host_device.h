// How a function is marked that kernels on a device call as well as the host.
#pragma once

#if defined(__CUDACC__)
#define DDP_HOOKS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DDP_HOOKS_HOST_DEVICE inline
#endif

#if defined(__CUDA_ARCH__)
#define DDP_HOOKS_UNROLL _Pragma("unroll")
#else
#define DDP_HOOKS_UNROLL
#endif
