#include "layout/topology.h"

#include <stdexcept>
#include <utility>

namespace ddp_hooks {
namespace {

std::vector<std::vector<int>> one_host_each(int world_size) {
  std::vector<std::vector<int>> hosts;
  for (int rank = 0; rank < world_size; ++rank) hosts.push_back({rank});
  return hosts;
}

}  // namespace

Topology::Topology(int world_size) : Topology(one_host_each(world_size)) {}

Topology::Topology(const std::vector<std::vector<int>>& hosts) : hosts_(hosts) {
  if (hosts_.empty() || hosts_.front().empty()) throw std::invalid_argument("expected hosts with ranks");
  places_.resize(hosts_.size() * hosts_.front().size(), {-1, -1});
  for (size_t host = 0; host < hosts_.size(); ++host) {
    if (hosts_[host].size() != hosts_.front().size()) throw std::invalid_argument("expected hosts of one size");
    for (size_t position = 0; position < hosts_[host].size(); ++position) {
      Place& place = places_.at(static_cast<size_t>(hosts_[host][position]));
      if (place.host >= 0) throw std::invalid_argument("expected each rank on one host");
      place = {static_cast<int>(host), static_cast<int>(position)};
    }
  }
}

std::vector<int> Topology::ranks_at(int position) const {
  std::vector<int> ranks;
  for (const std::vector<int>& host : hosts_) ranks.push_back(host.at(static_cast<size_t>(position)));
  return ranks;
}

std::vector<UsageMask> Topology::in_order_of_ranks(std::vector<UsageMask> masks) const {
  std::vector<UsageMask> ordered(masks.size());
  for (size_t rank = 0; rank < masks.size(); ++rank) {
    const auto [host, position] = places_.at(rank);
    ordered[rank] = std::move(masks.at(static_cast<size_t>(host * ranks_per_host() + position)));
  }
  return ordered;
}

Contributors Topology::by_host(const Contributors& by_rank) const {
  if (!shares_hosts() || !by_rank.are_known()) return by_rank;
  std::vector<UsageMask> masks;
  for (const std::vector<int>& ranks : hosts_) {
    UsageMask& mask = masks.emplace_back(by_rank.by_rank()[static_cast<size_t>(ranks.front())]);
    for (const int rank : ranks) mask.merge(by_rank.by_rank()[static_cast<size_t>(rank)]);
  }
  return Contributors(std::move(masks));
}

}  // namespace ddp_hooks
