#include "layout/transports.h"

#include <algorithm>
#include <bit>

namespace ddp_hooks {
namespace {

// What several contribute leaves the ring only if that saves this much of its transfers: a second phase, or adding up
// on every rank, has its price.
constexpr double kLeastGain = 0.1;

double transfers_of_broadcast(int contributors, double part, int world_size) {
  return contributors * part * (world_size - 1);
}

double transfers_by_owner(int contributors, double part, int world_size) {
  return (contributors - 1) * part + (world_size - 1);
}

double transfers_of_ring(int world_size) {
  return 2.0 * (world_size - 1);
}

}  // namespace

double part_of_bytes(Width width) {
  return width == Width::kFull ? 1 : 0.5;
}

bool narrow_pays(const CollectiveCosts& costs, int world_size) {
  // With the time it takes to make them narrow come masks, copies and messages: where all-to-alls save 1.9 times as
  // much as that (two ranks on loopback), a step loses a tenth, and where they save 20 times as much (1 Gbit/s), it
  // gains four tenths.
  constexpr double kLeastSaved = 3;
  // Half of a ring's transfers on two ranks, and a quarter where an owner sends a full sum.
  const double saved = transfers_of_ring(world_size) / world_size * (world_size == 2 ? 0.5 : 0.25);
  // What either takes is the link's time; what one takes more is not saved by sending less.
  const double seconds_per_byte = std::min(costs.all_reduce_seconds_per_byte, costs.all_to_all_seconds_per_byte);
  return kLeastSaved * costs.narrowing_seconds_per_byte <= saved * seconds_per_byte;
}

Transport transport_for(RankSet contributors, Width width, const Transports& transports) {
  if (contributors == 0 || transports.world_size < 2 || !transports.direct) return Transport::kAllReduce;
  if (std::has_single_bit(contributors)) return Transport::kBroadcast;
  const int count = std::popcount(contributors), world_size = transports.world_size;
  const double part = part_of_bytes(width);
  const double broadcast = transfers_of_broadcast(count, part, world_size);
  const double by_owner = transfers_by_owner(count, part, world_size);
  const double most = (1 - kLeastGain) * transfers_of_ring(world_size);
  if (broadcast <= most && (!transports.owners || broadcast <= by_owner)) return Transport::kBroadcast;
  return transports.owners && by_owner <= most ? Transport::kByOwner : Transport::kAllReduce;
}

double relative_cost(RankSet contributors, Width width, const Transports& transports) {
  const int count = std::popcount(contributors), world_size = transports.world_size;
  const double part = part_of_bytes(width), ring = transfers_of_ring(world_size);
  switch (transport_for(contributors, width, transports)) {
    case Transport::kBroadcast:
      return transfers_of_broadcast(count, part, world_size) / ring;
    case Transport::kByOwner:
      return transfers_by_owner(count, part, world_size) / ring;
    default:
      return 1;
  }
}

SentElements count_sent(const Units& units, const UsageMask& used, const Contributors& who,
                        const Transports& transports) {
  if (!who.are_known() || !transports.direct) {
    const auto elements = static_cast<double>(elements_in(units, used));
    return {elements, elements};
  }
  SentElements sent;
  for_each_used(units, used, [&](int64_t unit, size_t bit) {
    const auto length = static_cast<double>(units.end(unit) - units.begin(unit));
    const RankSet ranks = who.ranks(bit);
    const Width width = width_of(units, unit, used);
    const double at_full_width = relative_cost(ranks, Width::kFull, transports);
    sent.elements += length * (width == Width::kFull ? at_full_width : relative_cost(ranks, width, transports));
    sent.at_full_width += length * at_full_width;
  });
  return sent;
}

}  // namespace ddp_hooks
