// The kernels' own indexing code, run on the host over CPU memory, for tests where there is no GPU.
//
// Tables, chunks and lanes are those of slice_table.h and lanes.h; only launches, arithmetic on numbers and votes of a
// warp are played. Each access is checked: it must be aligned to its width, as a GPU demands, lie within a slice or the
// message, and no byte may be written twice. The first violation throws std::logic_error. Slow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/slice_table.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

struct EmulatedRun {
  int64_t launches = 0;
  int64_t chunks = 0;
  int64_t widest_word_bytes = 0;  // of any access
};

// These do what the functions of the same names in slice_copy.h and nonzero_scan.h do.
EmulatedRun emulate_gather_scaled(char* message, const std::vector<SliceOfMemory>& slices, ElementType type,
                                  double factor);
EmulatedRun emulate_scatter(char* message, const std::vector<SliceOfMemory>& slices);
EmulatedRun emulate_nonzero_scan(const std::vector<SliceOfMemory>& slices, ElementType type,
                                 std::vector<uint32_t>& flags);

}  // namespace ddp_hooks::cuda
