// Sends what does not go round a ring, over collectives in which every rank may send another amount.
//
// In a broadcast, each contributor sends its part to all other ranks, and every rank adds the parts up. Otherwise the
// contributors send their parts to an owner, which adds them up and sends the sum to all. Completions send the sums,
// and run in no fixed order, so sums have a group of their own, on which messages take turns; where collectives are put
// on streams, completions run at once, and the sums follow on the same group. Contributions are added in the order of
// the ranks, where they belong: a `Place` of rows is .grad. If some rank contributes nothing, a zero is added, as in
// plain DDP's sum, which makes a -0.0 a +0.0.
//
// A contribution is scaled before it is sent. What is coded, or crosses between hosts that ranks share, travels another
// way (transport/coded_sender.h, host_sender.h).
//
// Always holds: what is summed by its owner is summed in one place; whoever adds the same contributions gets the same
// bits. Thread-safety: the engine locks; completions run in the process groups' threads, and hold what they need. Every
// rank must agree on: the messages and their order.
#pragma once

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "agreement/control_groups.h"
#include "plan/direct_plan.h"
#include "transport/contributions.h"
#include "transport/launch.h"
#include "transport/staging.h"

namespace ddp_hooks {

class DirectSender {
 public:
  // All of it has to outlive every call. `control_groups`: with a group for sums, where that is needed.
  DirectSender(c10d::ProcessGroup& group, bool is_on_streams,
               const std::shared_ptr<const ControlGroups>& control_groups, Staging& staging,
               MessageStatistics& statistics)
      : group_(group),
        is_on_streams_(is_on_streams),
        control_groups_(control_groups),
        staging_(staging),
        statistics_(statistics) {}

  // Whether the group has what this needs for gradients on that device, where messages go between so many ranks or
  // hosts; the same on every rank.
  static bool is_possible(c10d::ProcessGroup& group, c10::Device device, int count);
  // And for sums by owners; not where completions on a device know no order, as with gloo.
  static bool can_sum(c10d::ProcessGroup& group, c10::Device device, int count);
  // And for coded messages, which need groups of their own.
  static bool can_code(c10d::ProcessGroup& group, c10::Device device, int count);
  // And whether sums need a group of their own.
  static bool needs_group_for_sums(c10d::ProcessGroup& group, c10::Device device, int count);

  void send(OutgoingMessage message);

 private:
  // What comes from all ranks, and where each rank's part of it begins; this rank's own is there, too.
  struct FromAll {
    at::Tensor memory;            // uint8
    std::vector<int64_t> begins;  // by rank, bytes
  };
  // Of a message: what goes to owners, and what comes back.
  struct OwnedMessage;

  void broadcast(OutgoingMessage outgoing);
  void collect(OutgoingMessage outgoing);
  void sum_when_back(const c10::intrusive_ptr<c10d::Work>& contributions, std::shared_ptr<OwnedMessage> owned);
  // Memory for what each rank has for all others.
  FromAll take_room(const Launch& launch, const DirectMessage& message, const at::TensorOptions& options);
  void count(int64_t sent_bytes);

  int rank() const { return group_.getRank(); }
  int world_size() const { return group_.getSize(); }

  c10d::ProcessGroup& group_;
  const bool is_on_streams_;
  const std::shared_ptr<const ControlGroups>& control_groups_;
  Staging& staging_;
  MessageStatistics& statistics_;
};

}  // namespace ddp_hooks
