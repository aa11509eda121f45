// Which units of a stretch of CPU memory hold a non-zero? Leaves each unit at the first block with one, so that of a
// dense gradient about a cache line a unit is read, and only zeros are read in full.
//
// A unit is `unit_length` consecutive elements; the last one may be shorter. Zero means +0.0 or -0.0. NaN, Inf and
// denormals are non-zero. Decided on bit patterns: no arithmetic whose result depends on the floating-point mode.
//
// Thread-safety: pure function.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/element_type.h"

namespace ddp_hooks::cpu {

struct UnitScanResult {
  std::vector<uint64_t> nonzero;         // bit u % 64 of word u / 64: unit u holds a non-zero; past the last unit zero
  std::vector<uint32_t> negative_zeros;  // units, ascending, that are zero and hold a -0.0
};

// `data` needs no alignment, and may be null when `numel` is 0. At most 2^32 units of at least one element.
UnitScanResult unit_scan(const void* data, int64_t numel, int64_t unit_length, ElementType type);

// The same where all but the `candidates`, bit u % 64 of word u / 64, are known to be +0.0: these are not read.
UnitScanResult unit_scan(const void* data, int64_t numel, int64_t unit_length, ElementType type,
                         const std::vector<uint64_t>& candidates);

// Whether a single unit does.
bool holds_nonzero(const void* unit, int64_t numel, ElementType type);

}  // namespace ddp_hooks::cpu
