// Sends what does not go round a ring, over collectives in which every rank may send another amount.
//
// What is broadcast each of its contributors sends to all others, and every rank adds it up. What is summed by its
// owner goes there first; the sums follow at the end of backward, because on one group every rank has to start
// collectives in the same order, and a completion knows no order. Contributions are added in the order of the ranks.
// Where some rank contributes nothing, a zero is added, as in plain DDP's sum, which makes a -0.0 a +0.0.
//
// A contribution at full width is scaled before it is sent. A narrow one is scaled by whoever adds it up, because a
// number that was divided may need more bits; and always by 1/divisor, which every rank knows alike.
//
// Always holds: what is summed by its owner is summed in one place; whoever adds the same contributions gets the same
// bits. Thread-safety: the engine locks; completions run in the process group's threads. Every rank must agree on: the
// messages and their order.
#pragma once

#include <cstdint>
#include <deque>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "kernels/packing.h"
#include "transport/direct_plan.h"
#include "transport/launch.h"
#include "transport/staging.h"

namespace ddp_hooks {

// Where a part lies, and what contributions to it are divided by before they are summed.
struct DirectPlace {
  SliceOfTensor slice;
  double divisor = 1;
  bool divides = false;  // as plain DDP does, see BucketViews::is_divided
};

// By group of the message, and by part.
using DirectPlaces = std::vector<std::vector<DirectPlace>>;

class DirectSender {
 public:
  // The group has to outlive every call.
  DirectSender(c10d::ProcessGroup& group, Staging& staging, MessageStatistics& statistics)
      : group_(group), staging_(staging), statistics_(statistics) {}

  // Whether the group has what this needs for gradients on that device; the same on every rank.
  static bool is_possible(c10d::ProcessGroup& group, c10::Device device);

  void send(Launch launch, const DirectMessage& message, DirectPlaces places);

  // The contributions that the step's oldest unsummed message waits for; none if there is no such message.
  c10::intrusive_ptr<c10d::Work> contributions(const std::shared_ptr<StepInFlight>& step);
  // Sums what this rank owns of that message, when its contributions are there, and sends the sums. After the last
  // bucket's messages.
  void send_sums(const std::shared_ptr<StepInFlight>& step);

  // Forgets what is waited for.
  void drop() { waiting_.clear(); }

 private:
  // What comes from all ranks, and where each rank's part of it begins; this rank's own is there, too.
  struct FromAll {
    at::Tensor memory;            // uint8
    std::vector<int64_t> begins;  // by rank, bytes
  };
  // A message whose owners wait for contributions.
  struct Waiting {
    Launch launch;
    DirectMessage message;
    DirectPlaces places;
    at::Tensor sent;  // to owners, by owner
    FromAll received;
    c10::intrusive_ptr<c10d::Work> work;
  };
  struct Splits {
    std::vector<int64_t> sent, received;  // elements, by rank
  };

  void broadcast(Launch launch, const DirectMessage& message, DirectPlaces places);
  void collect(Launch launch, const DirectMessage& message, DirectPlaces places);
  void broadcast_sums(const Waiting& waiting);
  // Memory for what each rank has for all others.
  FromAll take_room(const Launch& launch, const DirectMessage& message, const at::TensorOptions& options);
  // Sends what this rank has of that, once it lies there.
  c10::intrusive_ptr<c10d::Work> send_to_all(const DirectMessage& message, const FromAll& room);
  c10::intrusive_ptr<c10d::Work> all_gather(const FromAll& room);
  c10::intrusive_ptr<c10d::Work> all_to_all(at::Tensor received, at::Tensor sent, Splits splits);
  Splits no_splits() const;

  int rank() const { return group_.getRank(); }
  int world_size() const { return group_.getSize(); }

  c10d::ProcessGroup& group_;
  Staging& staging_;
  MessageStatistics& statistics_;
  std::deque<Waiting> waiting_;
};

}  // namespace ddp_hooks
