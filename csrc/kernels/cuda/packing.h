// Packs slices of CUDA memory, and adds up what was received: what cpu/narrowing.h and cpu/contribution_sum.h do, on a
// stream.
//
// One launch packs up to 1,300 slices, and adds up 880, or as many as have 1,840 contributions. Results are those of
// the CPU's kernels, bit for bit, but for what a NaN of one contribution alone holds when it is scaled, and that the
// device always multiplies. Streams
// and memory as slice_copy.h says.
#pragma once

#include <cstddef>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/packing_tables.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

// to = the slices, which are of one type, one after the other. Returns null, or what went wrong.
const char* pack(char* to, const SliceToPack* slices, size_t count, ElementType type, Stream stream);

// Each slice = its terms times `factor`, added in their order, and where `adds_zero`, + 0.0. Returns as above.
const char* sum_terms(const char* packed, const SliceToSum* slices, size_t count, ElementType type, double factor,
                      bool adds_zero, Stream stream);

}  // namespace ddp_hooks::cuda
