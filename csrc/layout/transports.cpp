#include "layout/transports.h"

#include <algorithm>
#include <bit>

namespace ddp_hooks {
namespace {

// What several contribute leaves the ring only if that saves this much of its transfers: a second phase, or adding up
// on every rank, has its price.
constexpr double kLeastGain = 0.1;

double transfers_of_broadcast(int contributors, const CodedParts& parts, int world_size) {
  return contributors * parts.contribution * (world_size - 1);
}

double transfers_by_owner(int contributors, const CodedParts& parts, int world_size) {
  return (contributors - 1) * parts.contribution + (world_size - 1) * parts.sum;
}

double transfers_of_ring(int world_size) {
  return 2.0 * (world_size - 1);
}

}  // namespace

Transport transport_for(RankSet contributors, const Transports& transports) {
  if (contributors == 0 || transports.world_size < 2 || !transports.direct) return Transport::kAllReduce;
  if (std::has_single_bit(contributors)) return Transport::kBroadcast;
  const int count = std::popcount(contributors), world_size = transports.world_size;
  const CodedParts parts = transports.coded.value_or(CodedParts{});
  const double broadcast = transfers_of_broadcast(count, parts, world_size);
  const double by_owner = transfers_by_owner(count, parts, world_size);
  const double most = (1 - kLeastGain) * transfers_of_ring(world_size);
  if (broadcast <= most && (!transports.owners || broadcast <= by_owner)) return Transport::kBroadcast;
  return transports.owners && by_owner <= most ? Transport::kByOwner : Transport::kAllReduce;
}

double relative_cost(RankSet contributors, const Transports& transports) {
  const int count = std::popcount(contributors), world_size = transports.world_size;
  const CodedParts parts = transports.coded.value_or(CodedParts{});
  const double ring = transfers_of_ring(world_size);
  switch (transport_for(contributors, transports)) {
    case Transport::kBroadcast:
      return transfers_of_broadcast(count, parts, world_size) / ring;
    case Transport::kByOwner:
      return transfers_by_owner(count, parts, world_size) / ring;
    case Transport::kAllReduce:
      break;
  }
  return 1;
}

double count_sent(const Units& units, const UsageMask& used, const Contributors& who, const Transports& transports) {
  if (!who.are_known() || !transports.direct) return static_cast<double>(elements_in(units, used));
  double elements = 0;
  for_each_used(units, used, [&](int64_t unit, size_t bit) {
    const auto length = static_cast<double>(units.end(unit) - units.begin(unit));
    elements += length * relative_cost(who.ranks(bit), transports);
  });
  return elements;
}

}  // namespace ddp_hooks
