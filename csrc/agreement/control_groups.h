// The gloo groups over which the ranks of one module agree on the host, whatever carries its gradients.
//
// They belong to whoever serves the module and are unknown to torch.distributed's own list of groups, so nobody else's
// groups change their names, and `destroy_process_group()` does not take them away.
//
// Always holds: with one rank there are none. Thread-safety: that of the groups; whoever drops the last reference may
// be any thread. Every rank must agree on: the order of what is asked of the groups, the grid.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "agreement/group_reference.h"
#include "agreement/ordered_group.h"

namespace ddp_hooks {

class ControlGroups {
 public:
  // `all`: every rank; null when there is one rank only. `axes`: those that differ from this rank in one coordinate of
  // the grid only, for each axis; empty in a small world, where `all` is the only axis.
  // `sums`: every rank, for what follows contributions; null where nothing is summed by owners, or the data group
  // carries that as well.
  ControlGroups(int world_size, c10::intrusive_ptr<c10d::Backend> all,
                std::vector<c10::intrusive_ptr<c10d::Backend>> axes, c10::intrusive_ptr<c10d::Backend> sums);

  int world_size() const { return world_size_; }
  size_t axis_count() const { return axes_.empty() ? 1 : axes_.size(); }
  c10d::Backend& axis(size_t number) const { return axes_.empty() ? *all_ : *axes_[number]; }
  c10d::Backend& all() const { return *all_; }
  OrderedGroup& sums() const { return *sums_; }
  // Whether sums can never be sent again on this rank.
  bool have_failed() const { return sums_ && sums_->has_failed(); }

 private:
  const int world_size_;
  GroupReference<c10d::Backend> all_;
  std::vector<GroupReference<c10d::Backend>> axes_;
  const std::unique_ptr<OrderedGroup> sums_;
};

}  // namespace ddp_hooks
