// Codes sections with AVX2: 32 bytes are the bytes of one kind of a whole block.
//
// Only for processors that have it. Makes the bytes that cpu/coding.cpp makes. Thread-safety: pure functions.
#pragma once

#include "kernels/cpu/coding.h"

namespace ddp_hooks::cpu {

// Of every type but float64.
SectionCoder section_coder_with_avx2(ElementType type);

}  // namespace ddp_hooks::cpu
