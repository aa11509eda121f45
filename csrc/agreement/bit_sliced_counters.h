// Who set each bit of a mask, in a form that merges without keeping the masks apart.
//
// A counter is cut into its binary digits, and the digits of one place lie together, in as many words as the mask has.
// The first digits are those of how many ranks set the bit, the others those of the ranks' own numbers. Merging adds
// the counts and ORs the numbers. Both are associative and commutative, so ranks that merge in any order, along the
// axes of a grid say, come to the same; and where the count is one, what was ORed is the number of that one rank.
//
// Thread-safety: pure functions. Every rank must agree on: the number of bits, the number of ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/contributors.h"
#include "layout/usage_mask.h"

namespace ddp_hooks {

size_t words_of_counters(size_t bits, size_t ranks);

// What `rank` alone knows. `counters` has words_of_counters(mask.size(), ranks) words.
void write_counters(const UsageMask& mask, size_t rank, size_t ranks, uint64_t* counters);

// Of ranks of which none is in both; counters of zeros are those of nobody.
void merge_counters(uint64_t* counters, const uint64_t* others, size_t bits, size_t ranks);

Contributors read_counters(const uint64_t* counters, size_t bits, size_t ranks);

}  // namespace ddp_hooks
