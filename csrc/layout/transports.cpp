#include "layout/transports.h"

#include <bit>

namespace ddp_hooks {
namespace {

// A second phase has to save this much of the ring's transfers before it is worth its latency.
constexpr double kLeastGain = 0.1;

}  // namespace

Transport transport_for(RankSet contributors, const Transports& transports) {
  const int world_size = transports.world_size;
  const int count = std::popcount(contributors);
  if (count == 0 || world_size < 2) return Transport::kAllReduce;
  if (count == 1) return Transport::kBroadcast;
  if (!transports.owners) return Transport::kAllReduce;
  const int ring = 2 * (world_size - 1);
  const int owned = world_size + count - 2;
  return owned <= (1 - kLeastGain) * ring ? Transport::kByOwner : Transport::kAllReduce;
}

double relative_cost(RankSet contributors, const Transports& transports) {
  if (transport_for(contributors, transports) == Transport::kAllReduce) return 1;
  const int world_size = transports.world_size;
  return static_cast<double>(world_size + std::popcount(contributors) - 2) / (2 * (world_size - 1));
}

UnitsCost cost_of(const Units& units, const UsageMask& used, const Contributors& who, const Transports& transports) {
  if (!who.are_known()) return {static_cast<double>(elements_in(units, used)), 0};
  UnitsCost cost;
  for_each_used(units, used, [&](int64_t unit, size_t bit) {
    const int64_t length = units.end(unit) - units.begin(unit);
    const RankSet ranks = who.ranks(bit);
    cost.elements += static_cast<double>(length) * relative_cost(ranks, transports);
    if (transport_for(ranks, transports) != Transport::kAllReduce) cost.direct_elements += length;
  });
  return cost;
}

}  // namespace ddp_hooks
