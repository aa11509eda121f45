// The form in which a mask of units travels: words of 64 bits, a header and then the smaller of two forms.
//
// A table of ten million rows has 1.25 MB of bits, and ten thousand are set. What is sent instead are runs of set
// bits: the distances between them and their lengths, each in about as many bits as it needs (Golomb-Rice codes); or
// else the bits as they are. The format is specified to the bit in docs/internals/protocol.md.
//
// Always holds: equal masks have equal words. Whatever words arrive, they end in a mask or in std::invalid_argument,
// within a time and a memory that the mask's size bounds.
// Thread-safety: pure functions.
// Every rank must agree on: the number of bits. Which form is taken is each sender's own affair.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/usage_mask.h"

namespace ddp_hooks {

// The smaller form of the mask, in words of 64 bits. Never more than most_words(mask.size()).
std::vector<uint64_t> compress(const UsageMask& mask);

// ORs a compressed mask into `into`. Throws std::invalid_argument, with `into` unchanged, when the words are no mask of
// that size. `words` may be followed by zero padding.
void merge_compressed(std::span<const uint64_t> words, UsageMask& into);

size_t most_words(size_t size);

}  // namespace ddp_hooks
