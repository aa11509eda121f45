#include "layout/transports.h"

#include <bit>

namespace ddp_hooks {
namespace {

// A second phase has to save this much of the ring's transfers before it is worth its latency.
constexpr double kLeastGain = 0.1;

int transfers_by_owner(RankSet contributors, int world_size) {
  return world_size + std::popcount(contributors) - 2;
}

}  // namespace

Transport transport_for(RankSet contributors, const Transports& transports) {
  if (contributors == 0 || transports.world_size < 2 || !transports.alone) return Transport::kAllReduce;
  if (std::has_single_bit(contributors)) return Transport::kByOwner;
  const int ring = 2 * (transports.world_size - 1);
  const bool pays = transfers_by_owner(contributors, transports.world_size) <= (1 - kLeastGain) * ring;
  return transports.sums && pays ? Transport::kByOwner : Transport::kAllReduce;
}

double relative_cost(RankSet contributors, const Transports& transports) {
  if (transport_for(contributors, transports) == Transport::kAllReduce) return 1;
  const int world_size = transports.world_size;
  return static_cast<double>(transfers_by_owner(contributors, world_size)) / (2 * (world_size - 1));
}

double cost_of(const Units& units, const UsageMask& used, const Contributors& who, const Transports& transports) {
  if (!who.are_known() || !transports.alone) return static_cast<double>(elements_in(units, used));
  double elements = 0;
  for_each_used(units, used, [&](int64_t unit, size_t bit) {
    const int64_t length = units.end(unit) - units.begin(unit);
    elements += static_cast<double>(length) * relative_cost(who.ranks(bit), transports);
  });
  return elements;
}

}  // namespace ddp_hooks
