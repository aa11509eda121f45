// Which units of a stretch of CPU memory hold a non-zero? Leaves each unit at the first block with one, so that of a
// dense gradient about a cache line a unit is read, and only zeros are read in full.
//
// A unit is `unit_length` consecutive elements; the last one may be shorter. Zero means what it means to
// nonzero_scan.h: +0.0 or -0.0, decided on bit patterns.
//
// Asked for widths, too, it also says which narrow forms hold a unit to the bit. It then leaves a unit when none of
// them does any more, so that numbers of full width are found out as soon; others are read in full, once from memory.
//
// Thread-safety: pure function.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/element_type.h"
#include "kernels/width.h"

namespace ddp_hooks::cpu {

struct UnitScanResult {
  std::vector<uint64_t> nonzero;         // bit u % 64 of word u / 64: unit u holds a non-zero; past the last unit zero
  std::vector<uint32_t> negative_zeros;  // units, ascending, that are zero and hold a -0.0
  // Bitmaps like `nonzero`: unit u holds a number that narrow_widths(type)[k] does not hold exactly. A form that is not
  // in use holds nothing but zeros. Empty where widths were not asked for.
  std::array<std::vector<uint64_t>, 2> inexact;
};

// `data` needs no alignment, and may be null when `numel` is 0. At most 2^32 units of at least one element.
UnitScanResult unit_scan(const void* data, int64_t numel, int64_t unit_length, ElementType type, bool widths = false);

// The same where all but the `candidates`, bit u % 64 of word u / 64, are known to be +0.0: these are not read.
UnitScanResult unit_scan(const void* data, int64_t numel, int64_t unit_length, ElementType type,
                         const std::vector<uint64_t>& candidates, bool widths = false);

// What a single unit holds.
struct UnitFindings {
  bool any_nonzero = false;
  bool any_negative_zero = false;  // means something only when any_nonzero is false
  std::array<bool, 2> inexact{};   // by narrow_widths(type), where widths were asked for
};

UnitFindings scan_unit(const void* data, int64_t numel, ElementType type, bool widths = false);

}  // namespace ddp_hooks::cpu
