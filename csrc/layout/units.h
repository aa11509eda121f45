// What is agreed on inside a parameter: its units.
//
// A parameter is one unit, or it is divided into units of the same length, one after the other in memory: its rows
// (what shares an index of the first dimension), or several rows where these are short, or equal parts of one where
// these are long. The last unit is shorter where several rows make one and their number does not divide.
//
// Thread-safety: none needed; these are functions. Every rank must agree on: the layout and the settings, and so on the
// units.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "layout/bucket_layout.h"
#include "layout/usage_mask.h"

namespace ddp_hooks {

struct UnitSettings {
  int64_t min_unit_bytes = 1;  // short rows are put together until a unit has this much
  int64_t max_unit_bytes = 1;  // longer rows are divided, if they can be, into equal parts of at most this much
  int64_t min_divided_bytes = 64 << 10;  // a parameter of less is one unit
};

// How a parameter's slice falls apart, and where in a mask of units its own begin.
struct Units {
  int64_t length = 0;        // elements of a unit
  int64_t slice_length = 0;  // elements of all of them
  // A multiple of 64, so that masks are put together and counted by words; of a single unit any bit.
  size_t first_bit = 0;

  int64_t count() const { return length == 0 ? 0 : (slice_length + length - 1) / length; }
  int64_t begin(int64_t unit) const { return unit * length; }
  int64_t end(int64_t unit) const { return std::min((unit + 1) * length, slice_length); }
};

Units units_of(const ParameterSlice& slice, int64_t element_bytes, const UnitSettings& settings);

// How many of the units are `used`, and how many elements these have.
int64_t count_in(const Units& units, const UsageMask& used);
int64_t elements_in(const Units& units, const UsageMask& used);

// Calls `act(unit, bit)` for each of the units that is used, in order.
template <typename Act>
void for_each_used(const Units& units, const UsageMask& used, const Act& act) {
  if (units.count() == 1) {
    if (used.test(units.first_bit)) act(0, units.first_bit);
    return;
  }
  const size_t words = UsageMask::word_count(static_cast<size_t>(units.count()));
  for (size_t begin = 0; begin < words * 64; begin += 64) {
    for (uint64_t word = used.words()[(units.first_bit + begin) / 64]; word != 0; word &= word - 1) {
      const size_t unit = begin + static_cast<size_t>(std::countr_zero(word));
      act(static_cast<int64_t>(unit), units.first_bit + unit);
    }
  }
}

// Whether so many elements are used, each counted at what it costs, that all of them are sent.
bool travels_whole(const Units& units, double used_elements);

}  // namespace ddp_hooks
