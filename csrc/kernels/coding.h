// Codes gradients exactly, in fewer bits: a coded message and back. Numbers keep every bit, whatever they mean.
//
// docs/internals/protocol.md ("A coded message") has the format, kernels/coded_block.h the layout of a block. The bytes
// depend only on the values and their type, never on the processor. Addresses need no alignment.
//
// Every rank must agree on: count and type of what a message holds. Thread-safety: pure functions.
#pragma once

#include <cstdint>

#include "kernels/element_type.h"

namespace ddp_hooks {

// The most bytes that so many values can take when they are coded: two bytes more for every 32 of them, and two for
// every 4,096.
int64_t most_coded_bytes(int64_t count, ElementType type);

// Codes the values to `to`, which has room for most_coded_bytes() and does not overlap them. Returns how many bytes the
// message takes; what lies behind may have been overwritten.
int64_t encode(const void* values, int64_t count, ElementType type, char* to);

// Writes the values of a message, or adds them to what is there, as torch's add does: one rounding an element. A sum
// that is not a number is the same NaN that sum_contributions makes.
//
// Anyone may have altered the message: it is checked as a whole before anything is written. Throws a c10::Error that
// says what is wrong with it. An altered mantissa cannot be told from another one.
void decode(const char* coded, int64_t bytes, int64_t count, ElementType type, void* to, bool adds);

}  // namespace ddp_hooks
