// The kernels' own indexing code, run on the host over CPU memory, for tests where there is no GPU.
//
// Tables, chunks, portions, samples and lanes are those of slice_table.h, units.h, samples.h and lanes.h; only
// launches, arithmetic on numbers and votes of a warp are played. Each access is checked: it must be aligned to its
// width, as a GPU demands, lie within a slice or the message, and no byte may be written twice. The first violation
// throws std::logic_error. Slow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/unit_scan.h"
#include "kernels/cuda/samples.h"
#include "kernels/cuda/slice_table.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

// A GPU loads this much of its memory at least. What is loaded twice comes from a cache.
constexpr int64_t kSectorBytes = 32;

struct EmulatedRun {
  int64_t launches = 0;
  int64_t chunks = 0;             // or portions, or warps
  int64_t widest_word_bytes = 0;  // of any access
  int64_t sectors_loaded = 0;     // of kSectorBytes; of units
};

// These do what the functions of the same names in slice_copy.h, nonzero_scan.h, unit_scan.h and unit_sample.h do.
EmulatedRun emulate_gather_scaled(char* message, const std::vector<SliceOfMemory>& slices, ElementType type,
                                  double factor);
EmulatedRun emulate_scatter(char* message, const std::vector<SliceOfMemory>& slices);
EmulatedRun emulate_nonzero_scan(const std::vector<SliceOfMemory>& slices, ElementType type,
                                 std::vector<uint32_t>& flags);
EmulatedRun emulate_unit_scan(const SliceOfMemory& slice, int64_t unit_bytes, ElementType type,
                              cpu::UnitScanResult& result);
// `zeros`: how many of the sampled units are zero, by slice.
EmulatedRun emulate_unit_sample(const std::vector<UnitsOfMemory>& slices, ElementType type,
                                std::vector<int64_t>& zeros);

}  // namespace ddp_hooks::cuda
