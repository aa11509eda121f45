// Which units of a slice of CUDA memory hold a non-zero? What cpu/unit_scan.h decides, in one launch, on a stream,
// between a memset of the two bitmaps and their copy to the host.
#pragma once

#include <cstdint>

#include "kernels/cuda/slice_copy.h"
#include "kernels/cuda/slice_table.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

// Fills the bitmaps (units.h says how they lie: 2 * words_of_bitmap(units) words, read with read_bitmaps), then copies
// them to `host_bitmaps`, which is page-locked memory and is filled when the stream has come past. Nothing waits for
// the device. There is one unit at least. Returns null, or CUDA's words for what went wrong.
const char* unit_scan(const SliceOfMemory& slice, int64_t unit_bytes, ElementType type, uint32_t* device_bitmaps,
                      uint32_t* host_bitmaps, Stream stream);

}  // namespace ddp_hooks::cuda
