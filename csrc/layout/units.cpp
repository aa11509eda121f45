#include "layout/units.h"

#include <algorithm>
#include <bit>

namespace ddp_hooks {
namespace {

// A row of a prime number of elements cannot be divided at all; and what has to be cut much smaller than wanted is
// better left whole.
constexpr int64_t kMostTimesAsManyParts = 4;

// Gathering and scattering moves each byte twice more than sending it from where it lies.
constexpr double kWholeFraction = 15.0 / 16;

// The largest equal parts of a row that are short enough.
int64_t part_length(int64_t row_length, int64_t longest) {
  const int64_t fewest = (row_length + longest - 1) / longest;
  for (int64_t parts = fewest; parts <= fewest * kMostTimesAsManyParts; ++parts) {
    if (row_length % parts == 0) return row_length / parts;
  }
  return row_length;
}

}  // namespace

Units units_of(const ParameterSlice& slice, int64_t element_bytes, const UnitSettings& settings) {
  Units units;
  units.length = units.slice_length = slice.length;
  if (slice.row_length == 0 || slice.length * element_bytes < settings.min_divided_bytes) return units;
  const int64_t shortest = std::max<int64_t>(1, (settings.min_unit_bytes - 1) / element_bytes + 1);
  const int64_t longest = std::max(shortest, settings.max_unit_bytes / element_bytes);
  int64_t length = slice.row_length;
  if (length < shortest) {
    length *= (shortest + length - 1) / length;
  } else if (length > longest) {
    length = part_length(length, longest);
  }
  units.length = std::min(length, slice.length);
  return units;
}

int64_t count_in(const Units& units, const UsageMask& used) {
  if (units.count() == 1) return used.test(units.first_bit) ? 1 : 0;
  int64_t count = 0;
  const auto first = used.words().begin() + static_cast<std::ptrdiff_t>(units.first_bit / 64);
  const auto words = static_cast<std::ptrdiff_t>(UsageMask::word_count(static_cast<size_t>(units.count())));
  for (auto word = first; word != first + words; ++word) count += std::popcount(*word);
  return count;
}

int64_t elements_in(const Units& units, const UsageMask& used) {
  const int64_t last = units.count() - 1;
  if (last < 0) return 0;
  const bool last_is_used = used.test(units.first_bit + static_cast<size_t>(last));
  const int64_t missing = units.length - (units.end(last) - units.begin(last));
  return count_in(units, used) * units.length - (last_is_used ? missing : 0);
}

bool travels_whole(const Units& units, double used_elements) {
  return used_elements >= kWholeFraction * static_cast<double>(units.slice_length);
}

}  // namespace ddp_hooks
