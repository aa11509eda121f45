// Copies between scattered slices and one message in CPU memory.
#pragma once

#include <cstdint>

#include "kernels/element_type.h"

namespace ddp_hooks::cpu {

// to[i] = from[i] * factor, rounded once to the element type: what plain DDP does while it fills a bucket. The ranges
// are the same or do not overlap.
void copy_scaled(void* to, const void* from, int64_t numel, ElementType type, double factor);

// to[i] = from[i] / divisor, in the same way: what plain DDP does with gradients that lie in the bucket already.
void copy_divided(void* to, const void* from, int64_t numel, ElementType type, double divisor);

void copy(void* to, const void* from, int64_t numel, ElementType type);

}  // namespace ddp_hooks::cpu
