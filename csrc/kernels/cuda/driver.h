// CUDA's driver, and the kernels that it is given.
//
// Nothing of CUDA is linked: the driver is looked for (libcuda.so.1) when a GPU is first served, so one file runs with
// every CUDA of torch, and without any. The kernels are compiled into the extension, for every GPU, unless nvcc was not
// found when it was built.
//
// Functions return null, or CUDA's words for what went wrong. A stream is a cudaStream_t, and null the device's legacy
// default stream; its device has to be current, and entered by the calling thread (enter). Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ddp_hooks::cuda {

using Stream = void*;
enum class KernelId;

// The kernels as a fat binary; empty in a build without them.
std::string_view kernels_image();

// Finds the driver and gives it the kernels, the first time. Returns null, or a sentence that says why GPUs cannot be
// served, and what to do.
const char* start_driver();

// Makes sure that the calling thread has the context of this device, as threads have that called no function of CUDA's
// runtime yet, and that the device can run the kernels. Returns as above.
const char* enter(int device_index);

const char* launch_blocks(KernelId kernel, int64_t blocks, void** arguments, Stream stream);
const char* fill_with_zeros(void* on_device, size_t bytes, Stream stream);
const char* copy_to_host(void* on_host, const void* on_device, size_t bytes, Stream stream);

// Whether what is put on the stream now is recorded into a graph instead of run. False where CUDA cannot say.
bool is_capturing(Stream stream);

// Begins anew with another library for the driver. Only what tests build calls it, and nothing reads a path from
// outside.
void use_driver(const std::string& path);

}  // namespace ddp_hooks::cuda
