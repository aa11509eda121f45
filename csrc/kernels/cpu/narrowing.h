// Numbers of CPU memory in fewer bits: which of them a form holds, and how they are packed. The forms are those of
// narrow_forms.h.
//
// Addresses need no alignment, and may be null where `numel` is 0. Thread-safety: pure functions.
#pragma once

#include <cstdint>

#include "kernels/element_type.h"
#include "kernels/width.h"

namespace ddp_hooks::cpu {

// The OR of the bits that narrowing would lose of each number; 0 where all are held to the bit.
using LostBits = uint64_t (*)(const char* from, int64_t numel);

// A function for one of narrow_widths(type).
LostBits lost_bits(Width width);

// to = from in one of narrow_widths(type), which holds all of it, or as it is (kFull). The ranges do not overlap.
void narrow(char* to, const char* from, int64_t numel, ElementType type, Width width);

}  // namespace ddp_hooks::cpu
