// Which units of a slice of CUDA memory hold a non-zero, and which narrow forms hold them? What cpu/unit_scan.h
// decides, in one launch, on a stream, between a memset of the bitmaps and their copy to the host.
#pragma once

#include <cstdint>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/slice_table.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

// Fills the bitmaps (units.h and widths.h say how they lie: bitmap_count() times words_of_bitmap(units) words, read
// with read_bitmaps or read_bitmaps_of_widths), then copies them to `host_bitmaps`, which is page-locked memory and is
// filled when the stream has come past. Nothing waits for the device. There is one unit at least. Returns null, or
// CUDA's words for what went wrong.
const char* unit_scan(const SliceOfMemory& slice, int64_t unit_bytes, ElementType type, bool widths,
                      uint32_t* device_bitmaps, uint32_t* host_bitmaps, Stream stream);

}  // namespace ddp_hooks::cuda
