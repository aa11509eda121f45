// What a direct message is made from, where it lies, and how contributions to it are added up.
//
// Thread-safety: none needed; these are values and functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/packing.h"
#include "plan/direct_plan.h"
#include "transport/launch.h"

namespace ddp_hooks {

// Where the stretches of one place lie, and what contributions to them are divided by before they are summed.
struct Place {
  at::Tensor flat;     // undefined where a message has none
  int64_t offset = 0;  // where a stretch would begin at offset 0
  double divisor = 1;
  bool divides = false;  // as plain DDP does, see BucketViews::is_averaged_by_division

  BorrowedSlice slice(const Stretch& stretch) const { return {&flat, offset + stretch.offset, stretch.length}; }
};

// By the number that stretches call it by.
using Places = std::vector<Place>;

// All places of a message are of one type, on one device.
const at::Tensor& one_of(const Places& places);
inline int64_t element_bytes_of(const Places& places) {
  return one_of(places).element_size();
}

// As for one tensor; see launch.h.
void keep_for_stream(const Places& places);

// A message, what it is for, and where it lies.
struct OutgoingMessage {
  Launch launch;
  DirectMessage message;
  Places places;
};

size_t count_parts(const std::vector<DirectGroup>& groups);

// Where contributions lie: those of every rank in one buffer, scaled, or those of this rank, `here`, where the sum is
// to be, and none of them scaled.
struct WhereContributed {
  int here = -1;

  bool scales() const { return here >= 0; }
};

// Of each part of a group the sum of contributions, which lie in `positions` by rank, and which are moved past them; it
// is to be `to(part)`. Who adds up what others scale differently scales it by 1/divisor, which every rank knows alike.
template <typename To>
void add_sums(const DirectGroup& group, const Places& places, const To& to, WhereContributed where, int world_size,
              std::vector<int64_t>& positions, std::vector<SliceSum>& sums) {
  const int64_t element_bytes = element_bytes_of(places);
  for (const DirectPart& part : group.parts) {
    SliceSum& sum = sums.emplace_back();
    sum.to = to(part);
    sum.divisor = where.scales() ? places[part.place].divisor : 1;
    sum.adds_zero = std::popcount(part.contributors) < world_size;
    for (int rank = 0; rank < world_size; ++rank) {
      if (!contains(part.contributors, rank)) continue;
      int64_t& position = positions[static_cast<size_t>(rank)];
      sum.contributions.push_back({position, rank == where.here});
      if (rank != where.here) position += part.length * element_bytes;
    }
  }
}

}  // namespace ddp_hooks
