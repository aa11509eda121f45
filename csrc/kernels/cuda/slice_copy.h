// Copies between scattered slices and one message in CUDA memory: what cpu/slice_copy.h does, on a stream.
//
// One launch moves up to 2,000 slices (kLargeTable), whatever their sizes; more of them take one launch for each 2,000.
// Addresses are multiples of the element's size, otherwise anything goes. Results are those of the CPU's kernels, bit
// for bit, but for what a NaN holds: the device's arithmetic has one NaN of its own.
//
// Nothing waits for the device, and the caller's array is read before the call returns. The memory has to stay valid
// until the stream has come past. The current device is the stream's. No CUDA header is needed to include this.
#pragma once

#include <cstddef>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/slice_table.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

// message = the slices, one after the other, times `factor`, rounded once; with factor 1 a plain copy. Returns null, or
// CUDA's words for what went wrong.
const char* gather_scaled(void* message, const SliceOfMemory* slices, size_t count, ElementType type, double factor,
                          Stream stream);

// The slices = their stretches of the message. Returns as above.
const char* scatter(const void* message, const SliceOfMemory* slices, size_t count, Stream stream);

}  // namespace ddp_hooks::cuda
