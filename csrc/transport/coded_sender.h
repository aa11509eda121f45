// Sends coded what does not go round a ring: exactly, in fewer bits (kernels/coding.h). On CPUs, over gloo.
//
// How many bytes a coded message takes depends on its numbers, and both sides have to know before it leaves. So a
// message travels in steps (transport/stepwise_message.h). The hook codes contributions, and starts the exchange of the
// sizes of some messages at once on the control group of all ranks.
//
// Thread-safety: the engine locks. Every rank must agree on: the messages, their order.
#pragma once

#include <memory>
#include <vector>

#include "transport/stepwise_message.h"

namespace ddp_hooks {

class CodedSender {
 public:
  // The references have to outlive every call. `control_groups`: with groups for contributions and for sums, where
  // these are needed.
  CodedSender(int rank, int world_size, const std::shared_ptr<const ControlGroups>& control_groups, Staging& staging,
              std::shared_ptr<LateStatistics> counted)
      : rank_(rank),
        world_size_(world_size),
        control_groups_(control_groups),
        staging_(staging),
        counted_(std::move(counted)) {}

  void send(std::vector<OutgoingMessage> messages);

 private:
  void send_batch(std::vector<OutgoingMessage> messages);

  const int rank_;
  const int world_size_;
  const Groups& control_groups_;
  Staging& staging_;
  const std::shared_ptr<LateStatistics> counted_;
};

}  // namespace ddp_hooks
