// The gloo groups over which the ranks of one module agree on the host, whatever carries its gradients.
//
// They belong to whoever serves the module and are unknown to torch.distributed's own list of groups, so nobody else's
// groups change their names, and `destroy_process_group()` does not take them away.
//
// Where ranks share hosts, groups of the ranks of a host and of those at the same position on all hosts carry
// gradients.
//
// Always holds: with one rank there are none. Thread-safety: that of the groups; whoever drops the last reference may
// be any thread. Every rank must agree on: the order of what is asked of the groups, the grid, the topology.
#pragma once

#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "agreement/group_reference.h"
#include "agreement/ordered_group.h"
#include "layout/topology.h"

namespace ddp_hooks {

// What carries gradients, and null where that is not needed. Between hosts, a group has the ranks at the same position
// of all hosts; without hosts that are shared, every rank.
struct DataGroups {
  c10::intrusive_ptr<c10d::Backend> sums;           // what follows contributions, unless the data group carries that
  c10::intrusive_ptr<c10d::Backend> contributions;  // those that completions start
  c10::intrusive_ptr<c10d::Backend> sizes;          // of contributions, unless the hook starts their exchange
  c10::intrusive_ptr<c10d::Backend> shares;         // within a host: to whoever adds them up,
  c10::intrusive_ptr<c10d::Backend> results;        // and back
};

class ControlGroups {
 public:
  // `all`: every rank; null when there is one rank only. `axes`: those that differ from this rank in one coordinate of
  // the grid only, for each axis; empty in a small world, where `all` is the only axis.
  ControlGroups(Topology topology, c10::intrusive_ptr<c10d::Backend> all,
                std::vector<c10::intrusive_ptr<c10d::Backend>> axes, DataGroups data);

  const Topology& topology() const { return topology_; }
  int world_size() const { return topology_.host_count() * topology_.ranks_per_host(); }
  size_t axis_count() const { return axes_.empty() ? 1 : axes_.size(); }
  c10d::Backend& axis(size_t number) const { return axes_.empty() ? *all_ : *axes_[number]; }
  c10d::Backend& all() const { return *all_; }
  OrderedGroup& sums() const { return *sums_; }
  bool has_contributions() const { return contributions_ != nullptr; }
  OrderedGroup& contributions() const { return *contributions_; }
  OrderedGroup& sizes() const { return *sizes_; }
  c10d::Backend& shares() const { return *shares_; }
  OrderedGroup& results() const { return *results_; }
  // Turns that were taken will not be used; as `OrderedGroup::fail`.
  std::exception_ptr fail(std::exception_ptr error) const;
  // Whether what takes turns can never be sent again on this rank.
  bool have_failed() const;

 private:
  const Topology topology_;
  GroupReference<c10d::Backend> all_;
  std::vector<GroupReference<c10d::Backend>> axes_;
  const std::unique_ptr<OrderedGroup> sums_;
  const std::unique_ptr<OrderedGroup> contributions_;
  const std::unique_ptr<OrderedGroup> sizes_;
  GroupReference<c10d::Backend> shares_;
  const std::unique_ptr<OrderedGroup> results_;
};

}  // namespace ddp_hooks
