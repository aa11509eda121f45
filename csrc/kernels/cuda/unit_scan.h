// Which units of many slices of CUDA memory hold a non-zero? What cpu/unit_scan.h decides, in one pass, on a stream:
// one launch for each 450 slices, between a memset of the bitmaps and their copy to the host.
//
// A warp whose unit is known to hold a non-zero reads no more of it, so a dense gradient costs little more than the
// launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/driver.h"
#include "kernels/element_type.h"
#include "kernels/slices_of_memory.h"

namespace ddp_hooks::cuda {

// Fills the bitmaps, slice after slice (units.h says how they lie: kBitmaps times words_of_bitmap(units) words each,
// read with read_bitmaps), then copies them to `host_bitmaps`, which is page-locked memory and is filled when the
// stream has come past. Nothing waits for the device. Returns null, or CUDA's words for what went wrong.
const char* unit_scan(const UnitsOfMemory* slices, size_t count, ElementType type, uint32_t* device_bitmaps,
                      uint32_t* host_bitmaps, Stream stream);

}  // namespace ddp_hooks::cuda
