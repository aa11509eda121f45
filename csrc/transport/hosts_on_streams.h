// The groups over which ranks add up in their hosts and then between them, where collectives are put on streams.
//
// They belong to whoever serves the module, as control groups do. What is under way in them is carried out before they
// go, in a thread that may wait for it.
//
// Always holds: a rank's place in the group within its host is its position there, and that in the group between hosts
// is the host's number. Thread-safety: that of the groups; whoever drops the last reference may be any thread. Every
// rank must agree on: the topology, the order of what is asked of each group.
#pragma once

#include <torch/custom_class.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "agreement/group_reference.h"
#include "layout/topology.h"

namespace ddp_hooks {

class HostsOnStreams {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  HostsOnStreams(Topology topology, Group within, Group between)
      : topology_(std::move(topology)),
        within_(c10::make_intrusive<ShutDownLast>(std::move(within))),
        between_(c10::make_intrusive<ShutDownLast>(std::move(between))) {}

  const Topology& topology() const { return topology_; }
  // This host's ranks.
  c10d::ProcessGroup& within() const { return *within_->group; }
  // Those at this rank's position on all hosts.
  c10d::ProcessGroup& between() const { return *between_->group; }

 private:
  // NCCL aborts what is under way in a group that is dropped before it was shut down.
  struct ShutDownLast : torch::CustomClassHolder {
    explicit ShutDownLast(Group group) : group(std::move(group)) {}
    ~ShutDownLast() override {
      try {
        group->shutdown();
      } catch (...) {
        // Whoever waits for what has failed in it is told by that.
      }
    }
    const Group group;
  };

  const Topology topology_;
  const GroupReference<ShutDownLast> within_;
  const GroupReference<ShutDownLast> between_;
};

}  // namespace ddp_hooks
