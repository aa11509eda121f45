// The kernels' own indexing code, run on the host over CPU memory, for tests where there is no GPU.
//
// played_kernels.h says what is played, and what is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/samples.h"
#include "kernels/cuda/slice_table.h"
#include "kernels/cuda/sum_tables.h"
#include "kernels/cuda/units.h"
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

// These do what the functions of the same names in slice_copy.h, unit_scan.h, unit_sample.h and
// contribution_sum.h do.
EmulatedRun emulate_gather_scaled(char* message, const std::vector<SliceOfMemory>& slices, ElementType type,
                                  double factor);
EmulatedRun emulate_scatter(char* message, const std::vector<SliceOfMemory>& slices);
EmulatedRun emulate_unit_scan(const std::vector<UnitsOfMemory>& slices, ElementType type,
                              std::vector<uint32_t>& bitmaps);
EmulatedRun emulate_unit_sample(const std::vector<UnitsOfMemory>& slices, ElementType type,
                                std::vector<uint32_t>& words);
EmulatedRun emulate_sum_terms(const char* packed, int64_t packed_bytes, const std::vector<SliceToSum>& slices,
                              ElementType type, double factor, bool adds_zero);

// What coding.h does. How many bytes a message takes, and what is wrong with one, come last.
EmulatedRun emulate_encode(const char* values, int64_t count, ElementType type, char* to, int64_t most_bytes,
                           int64_t& bytes);
EmulatedRun emulate_decode(const char* coded, int64_t bytes, int64_t count, ElementType type, char* to, bool adds,
                           uint32_t& wrong);

}  // namespace ddp_hooks::cuda
