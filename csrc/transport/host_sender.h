// Sends between hosts with several ranks each, so that what crosses between hosts crosses once.
//
// Each rank of a host takes a share of the message (plan/shares.h), and completions start one step after the other. On
// CPUs, over gloo:
//
//   what                          over                      when
//   contributions to each share   shares: the host's ranks  the hook
//   the share, between hosts      as stepwise_message.h     this rank has added its share up; each message in its turn
//                                 says: ranks at the same
//                                 position on all hosts
//   shares, as they are now, and  results: the host's       the share is back; each message in its turn
//   how many bytes they took      ranks
//
// Where collectives are put on streams, completions run at once, so that nothing takes turns: contributions and results
// go over one group of the host's ranks, and transport/direct_sender.h sends the share between hosts. What is
// all-reduced does not come here then.
//
// Contributions are scaled before they are added up, in the order of ranks; so a sum is the same wherever it is added
// up.
//
// Always holds: a host to whose part of a message none of its ranks contributes adds nothing up. Thread-safety: the
// engine locks; completions run in the groups' threads, or at once, and hold what they need. Every rank must agree on:
// the messages, their order, the topology.
#pragma once

#include <memory>
#include <vector>

#include "transport/direct_sender.h"
#include "transport/hosts_on_streams.h"
#include "transport/stepwise_message.h"

namespace ddp_hooks {

class HostSender {
 public:
  // The references have to outlive every call. `control_groups`: with all groups that carry gradients, unless
  // `on_streams` are there.
  HostSender(int rank, const std::shared_ptr<const ControlGroups>& control_groups,
             const std::shared_ptr<const HostsOnStreams>& on_streams, Staging& staging,
             std::shared_ptr<LateStatistics> counted)
      : rank_(rank),
        control_groups_(control_groups),
        on_streams_(on_streams),
        staging_(staging),
        counted_(std::move(counted)) {}

  // Contributions lie in the places, scaled as these say.
  void send(OutgoingMessage message);

 private:
  class Message;
  using MessagePointer = std::shared_ptr<Message>;

  void send_on_streams(OutgoingMessage message);
  static void send_results(const MessagePointer& message, const Groups& groups,
                           const std::shared_ptr<LateStatistics>& counted);
  static void fail(const MessagePointer& message, const Groups& groups, const std::exception_ptr& error);

  const int rank_;
  const Groups& control_groups_;
  const std::shared_ptr<const HostsOnStreams>& on_streams_;
  Staging& staging_;
  const std::shared_ptr<LateStatistics> counted_;
};

}  // namespace ddp_hooks
