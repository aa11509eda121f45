// Adds up what was received in CUDA memory: what cpu/contribution_sum.h does, on a stream.
//
// One launch adds up 880 slices, or as many as have 1,840 contributions. Results are those of the CPU's kernels, bit
// for bit, but for what a NaN of one contribution alone holds when it is scaled, and that the device always multiplies.
// Streams and memory as slice_copy.h says.
#pragma once

#include <cstddef>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/sum_tables.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

// Each slice = its terms times `factor`, added in their order, and where `adds_zero`, + 0.0. Returns null, or what
// went wrong.
const char* sum_terms(const char* packed, const SliceToSum* slices, size_t count, ElementType type, double factor,
                      bool adds_zero, Stream stream);

}  // namespace ddp_hooks::cuda
