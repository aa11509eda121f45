// Those functions of CUDA's driver that are called, as cuda.h has them; tests/kernels/driver_api.cpp compares the two.
//
// Declared here, because builds on machines without CUDA serve GPUs elsewhere. Handles are pointers, a device is its
// number, and statuses are numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp_hooks::cuda {

using DriverStatus = int;
constexpr DriverStatus kDriverSuccess = 0;
constexpr DriverStatus kDriverNotFound = 500;
constexpr DriverStatus kDriverCaptureImplicit = 906;
constexpr int kNotCapturing = 0;
using DeviceAddress = uint64_t;

// Each with its parameters.
#define DDP_HOOKS_DRIVER_FUNCTIONS(FUNCTION)                                                                           \
  FUNCTION(cuInit, (unsigned flags))                                                                                   \
  FUNCTION(cuDriverGetVersion, (int* version))                                                                         \
  FUNCTION(cuGetErrorString, (DriverStatus status, const char** text))                                                 \
  FUNCTION(cuLibraryLoadData, (void** library, const void* image, int* jit_options, void** jit_values,                 \
                               unsigned jit_count, int* options, void** values, unsigned count))                       \
  FUNCTION(cuLibraryGetKernel, (void** kernel, void* library, const char* name))                                       \
  FUNCTION(cuKernelGetFunction, (void** function, void* kernel))                                                       \
  FUNCTION(cuDeviceGet, (int* device, int index))                                                                      \
  FUNCTION(cuDevicePrimaryCtxRetain, (void** context, int device))                                                     \
  FUNCTION(cuCtxGetCurrent, (void** context))                                                                          \
  FUNCTION(cuCtxSetCurrent, (void* context))                                                                           \
  FUNCTION(cuLaunchKernel, (void* kernel, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x, \
                            unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream,               \
                            void** arguments, void** extra))                                                           \
  FUNCTION(cuMemsetD8Async, (DeviceAddress to, unsigned char value, size_t bytes, void* stream))                       \
  FUNCTION(cuMemcpyAsync, (DeviceAddress to, DeviceAddress from, size_t bytes, void* stream))                          \
  FUNCTION(cuStreamIsCapturing, (void* stream, int* status))

}  // namespace ddp_hooks::cuda
