// What a device does with slices of its memory: a table of functions for each device type that has kernels.
//
// The CPU is not among them: it does the same at once, with cpu/. A table's functions put what they do on a stream, and
// do not wait for the device. The caller's arrays are read before a call returns; the memory that they point to has to
// stay valid until the stream has come past. The stream's device is current. Each returns null, or the device's words
// for what went wrong.
//
// What they have in common with each other, and with the CPU's, is how tables, bitmaps and samples lie in memory: the
// headers in cuda/, which need no CUDA. cuda/*.h say what each function does, one by one.
//
// Thread-safety: tables are registered when the extension is loaded, or right after that, and never change.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/element_type.h"
#include "kernels/slices_of_memory.h"

namespace ddp_hooks {

// As torch's getStreamNativeHandle returns it, such as a cudaStream_t.
using StreamHandle = void*;

struct DeviceKernels {
  // What process groups call their backends for it, whose collectives are put on its streams and can average.
  std::vector<std::string> backends;
  const char* (*gather_scaled)(void* message, const SliceOfMemory* slices, size_t count, ElementType type,
                               double factor, StreamHandle stream) = nullptr;
  const char* (*scatter)(const void* message, const SliceOfMemory* slices, size_t count, StreamHandle stream) = nullptr;
  const char* (*unit_scan)(const UnitsOfMemory* slices, size_t count, ElementType type, uint32_t* device_bitmaps,
                           uint32_t* host_bitmaps, StreamHandle stream) = nullptr;
  const char* (*unit_sample)(const UnitsOfMemory* slices, size_t count, ElementType type, uint32_t* device_words,
                             uint32_t* host_words, StreamHandle stream) = nullptr;
  const char* (*sum_terms)(const char* packed, const SliceToSum* slices, size_t count, ElementType type, double factor,
                           bool adds_zero, StreamHandle stream) = nullptr;
  // The functions of cuda/coding.h.
  const char* (*encode)(const void* values, int64_t count, ElementType type, char* to, uint32_t* device_bytes,
                        uint32_t* host_bytes, StreamHandle stream) = nullptr;
  const char* (*decode)(const char* coded, int64_t bytes, int64_t count, ElementType type, void* to, bool adds,
                        uint32_t* device_wrong, uint32_t* host_wrong, StreamHandle stream) = nullptr;
  // Asked before anything else, by each thread: null, or a sentence that says why the device cannot be used and what to
  // do. With an index below 0 only what all devices of the type need is looked at. Null if nothing can be wrong.
  const char* (*enter)(int device_index) = nullptr;
  // Whether what is put on the stream now is recorded into a graph instead of run.
  bool (*is_capturing)(StreamHandle stream) = nullptr;
};

// Null where gradients on such devices cannot be served.
const DeviceKernels* find_device_kernels(c10::DeviceType type);

// For a device type that this build knows nothing of. Not while anything of it is served.
void register_device_kernels(c10::DeviceType type, const DeviceKernels& kernels);

}  // namespace ddp_hooks
