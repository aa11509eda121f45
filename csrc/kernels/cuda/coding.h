// Codes CUDA memory, and decodes to it: what coding.h does, on a stream, with the same bytes.
//
// Streams and memory as slice_copy.h says. Functions return null, or CUDA's words for what went wrong. Values lie at
// multiples of their size; a message may begin anywhere.
#pragma once

#include <cstdint>

#include "kernels/cuda/driver.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

// Two words: how many bytes a message takes, the lower half first.
constexpr int kWordsOfSize = 2;

// Codes the values to `to`, which has room for most_coded_bytes(). Fills the words at `device_bytes`, and copies them
// to `host_bytes`, which is page-locked memory and is filled when the stream has come past. Two launches.
const char* encode(const void* values, int64_t count, ElementType type, char* to, uint32_t* device_bytes,
                   uint32_t* host_bytes, Stream stream);

// Checks a message of so many bytes. If it is sound, its values are written, or added to what is there. A word is
// filled as above: 0, or bits that say what is wrong (coding_lanes.h); nothing is written then. Two launches.
const char* decode(const char* coded, int64_t bytes, int64_t count, ElementType type, void* to, bool adds,
                   uint32_t* device_wrong, uint32_t* host_wrong, Stream stream);

}  // namespace ddp_hooks::cuda
