// What this build can do with a device, and the stream that work on it belongs to.
//
// Streams come from torch's device-generic interface, and kernels from a table by device type, so nothing here or above
// needs a device's own headers: code is the same with a CPU torch, and the kernels alone are left out. Thread-safety:
// pure functions of the calling thread's state.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/device_kernels.h"

namespace ddp_hooks {

// Whether gradients on devices of that type can be served.
bool can_serve(c10::DeviceType type);

// Throws unless gradients on this device can be served; says what this build lacks.
void check_device(c10::Device device);

// The device's table. Throws as above.
const DeviceKernels& kernels_of(c10::Device device);

// Throws what a function of the table said went wrong; `what` was to be done.
void check_launch(const char* error, c10::Device device, const char* what);

// The stream that the calling thread's work for a device goes to, and its native handle (a cudaStream_t).
c10::Stream current_stream(c10::Device device);
StreamHandle current_stream_handle(c10::Device device);

// Whether what is put on that stream now is recorded into a graph instead of run. Always false on the CPU.
bool is_capturing(c10::Device device);

// Throws where that is so.
void refuse_capture(c10::Device device);

}  // namespace ddp_hooks
