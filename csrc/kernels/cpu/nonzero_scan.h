// Does a stretch of CPU memory hold a non-zero? Stops at the first one, so a dense gradient costs next to nothing.
//
// Zero means +0.0 or -0.0. NaN, Inf and denormals are non-zero. Decided on bit patterns: no arithmetic, no flush to
// zero, the same answer under every floating-point mode.
#pragma once

#include <cstdint>

#include "kernels/element_type.h"

namespace ddp_hooks::cpu {

struct ScanResult {
  bool any_nonzero = false;
  // Meaningful only when any_nonzero is false: some element was -0.0.
  bool any_negative_zero = false;
};

ScanResult nonzero_scan(const void* data, int64_t numel, ElementType type);

}  // namespace ddp_hooks::cpu
