// What this build can do with a device, and the stream that work on it belongs to.
//
// Streams come from torch's device-generic interface, so nothing here or above needs CUDA's headers: code is the same
// with a CPU torch, and the kernels alone are left out. Thread-safety: pure functions of the calling thread's state.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp_hooks {

// Whether the CUDA kernels are in this build.
bool has_cuda();

// Throws unless gradients on this device can be served; says what this build lacks.
void check_device(c10::Device device);

// The stream that the calling thread's work for a device goes to, and its native handle (a cudaStream_t).
c10::Stream current_stream(c10::Device device);
void* current_stream_handle(c10::Device device);

// Whether what is put on that stream now is recorded into a graph instead of run. Always false on the CPU.
bool is_capturing(c10::Device device);

}  // namespace ddp_hooks
