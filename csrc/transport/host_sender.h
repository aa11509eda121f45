// Sends between hosts with several ranks each, so that what crosses between hosts crosses once. On CPUs, over gloo.
//
// Each rank of a host takes a share of the message (plan/shares.h), and completions start one step after the other:
//
//   what                          over                      when
//   contributions to each share   shares: the host's ranks  the hook
//   the share, between hosts      as stepwise_message.h     this rank has added its share up; each message in its turn
//                                 says: ranks at the same
//                                 position on all hosts
//   shares, as they are now, and  results: the host's       the share is back; each message in its turn
//   how many bytes they took      ranks
//
// Contributions are scaled before they are added up, in the order of ranks; so a sum is the same wherever it is added
// up.
//
// Always holds: a host to whose part of a message none of its ranks contributes adds nothing up. Thread-safety: the
// engine locks; completions run in the groups' threads, and hold what they need. Every rank must agree on: the
// messages, their order, the topology.
#pragma once

#include <memory>
#include <vector>

#include "transport/stepwise_message.h"

namespace ddp_hooks {

class HostSender {
 public:
  // The references have to outlive every call. `control_groups`: with all groups that carry gradients.
  HostSender(int rank, const std::shared_ptr<const ControlGroups>& control_groups, Staging& staging,
             std::shared_ptr<LateStatistics> counted)
      : rank_(rank), control_groups_(control_groups), staging_(staging), counted_(std::move(counted)) {}

  // Contributions lie in the places, scaled as these say.
  void send(OutgoingMessage message);

 private:
  class Message;
  using MessagePointer = std::shared_ptr<Message>;

  static void send_results(const MessagePointer& message, const Groups& groups,
                           const std::shared_ptr<LateStatistics>& counted);
  static void fail(const MessagePointer& message, const Groups& groups, const std::exception_ptr& error);

  const int rank_;
  const Groups& control_groups_;
  Staging& staging_;
  const std::shared_ptr<LateStatistics> counted_;
};

}  // namespace ddp_hooks
