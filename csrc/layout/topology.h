// Which ranks share a host. Ranks on one host add up what they have, and from then on plans count hosts.
//
// Always holds: every host has as many ranks as every other. With one rank for each host, a host is a rank.
// Thread-safety: none; it is a value. Every rank must agree on all of it.
#pragma once

#include <cstddef>
#include <vector>

#include "layout/contributors.h"

namespace ddp_hooks {

class Topology {
 public:
  // Every rank by itself.
  explicit Topology(int world_size);
  // The ranks of each host.
  explicit Topology(const std::vector<std::vector<int>>& hosts);

  int host_count() const { return static_cast<int>(hosts_.size()); }
  int ranks_per_host() const { return static_cast<int>(hosts_.front().size()); }
  // Whether ranks have others to add up with before anything leaves their host.
  bool shares_hosts() const { return ranks_per_host() > 1; }
  int host_of(int rank) const { return places_[static_cast<size_t>(rank)].host; }
  // The rank's position among those of its host.
  int position_in_host(int rank) const { return places_[static_cast<size_t>(rank)].position; }

  // The ranks at this position of each host.
  std::vector<int> ranks_at(int position) const;

  // From the order of hosts, and in each of its ranks.
  std::vector<UsageMask> in_order_of_ranks(std::vector<UsageMask> masks) const;

  // A host contributes what one of its ranks does.
  Contributors by_host(const Contributors& by_rank) const;

 private:
  struct Place {
    int host = 0;
    int position = 0;
  };

  std::vector<std::vector<int>> hosts_;
  std::vector<Place> places_;  // by rank
};

}  // namespace ddp_hooks
