// Which of many slices of CUDA memory hold a non-zero? What cpu/unit_scan.h decides of one unit, in one pass, on a
// stream.
//
// Decided on bit patterns, so NaN, Inf and denormals are non-zero. A warp whose slice is known to hold a non-zero reads
// no more of it, so a dense gradient costs little more than the launch. One launch for each 2,000 slices, between a
// memset and a small copy to the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/slice_table.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

// Sets device_flags[i] to what was found in slice i (kFoundNonzero, kFoundNegativeZero), then copies the flags to
// `host_flags`, which is page-locked memory and is filled when the stream has come past. Nothing waits for the device.
// Returns null, or CUDA's words for what went wrong.
const char* nonzero_scan(const SliceOfMemory* slices, size_t count, ElementType type, uint32_t* device_flags,
                         uint32_t* host_flags, Stream stream);

}  // namespace ddp_hooks::cuda
