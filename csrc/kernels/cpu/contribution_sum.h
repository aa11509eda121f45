// Adds up what several ranks contribute to one slice of CPU memory, in one pass.
//
// Each contribution is scaled and rounded, and then added to those before it, rounded again: number by number what
// cpu/slice_copy.h and an addition of torch's would make of it. A NaN is a NaN: which of two is left is the processor's
// choice.
//
// Addresses need no alignment. Thread-safety: pure function.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/element_type.h"

namespace ddp_hooks::cpu {

// to[i] = factor * terms[0][i] + factor * terms[1][i] + ..., and where `adds_zero`, + 0.0. There is a term at least.
// One may lie in `to` itself; the others do not overlap it.
void sum_terms(char* to, const char* const* terms, size_t count, int64_t numel, ElementType type, double factor,
               bool adds_zero);

}  // namespace ddp_hooks::cpu
