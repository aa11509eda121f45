// How many of a sample of the units of slices of CUDA memory are zero? On a stream: one launch for each 1,300 slices,
// between a memset of the words and their copy to the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/samples.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

// Fills kWordsPerSample words a slice (read with count_zeros), then copies them to `host_words`, which is page-locked
// memory and is filled when the stream has come past. Nothing waits for the device. Returns null, or CUDA's words for
// what went wrong.
const char* unit_sample(const UnitsOfMemory* slices, size_t count, ElementType type, uint32_t* device_words,
                        uint32_t* host_words, Stream stream);

}  // namespace ddp_hooks::cuda
