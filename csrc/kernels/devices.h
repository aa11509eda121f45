// What this build can do with a device, and the stream that work on it belongs to.
//
// Streams come from torch's device-generic interface, and kernels from a table by device type, so nothing here or above
// needs a device's own headers: code is the same with a CPU torch. Thread-safety: pure functions of the calling
// thread's state.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "kernels/device_kernels.h"

namespace ddp_hooks {

// Why gradients on this device cannot be served, and what to do; nothing if they can. Without an index the device's
// type alone is looked at.
std::optional<std::string> why_unserved(c10::Device device);

// Throws that.
void check_device(c10::Device device);

// The device's table, which the calling thread may use then. Throws as above.
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
