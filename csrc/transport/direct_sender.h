// Sends what some ranks contribute by owner, over collectives in which every rank may send another amount.
//
// What one rank alone contributes it sends to all others. What several contribute goes to its owner first, who adds it
// up in the order of the ranks; the sums follow at the end of backward, because on one group every rank has to start
// collectives in the same order, and a completion knows no order. Zeros are added to all of it, as in plain DDP's sum,
// which makes a -0.0 a +0.0.
//
// Always holds: what is summed is summed in one place. Thread-safety: the engine locks; completions run in the process
// group's threads. Every rank must agree on: the messages and their order.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "transport/direct_plan.h"
#include "transport/launch.h"
#include "transport/staging.h"

namespace ddp_hooks {

// Where a part lies, and what a contribution is divided by before it is sent.
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
  // A message whose owners wait for contributions.
  struct Waiting {
    Launch launch;
    std::vector<DirectGroup> groups;
    DirectPlaces places;
    at::Tensor sent;      // to owners, by owner
    at::Tensor own;       // what this rank contributes to what it owns
    at::Tensor received;  // from contributors, by contributor
    c10::intrusive_ptr<c10d::Work> work;
  };
  struct Splits {
    std::vector<int64_t> sent, received;  // elements, by rank
  };

  void collect(Launch launch, const DirectMessage& message, DirectPlaces places);
  // To all others what this rank owns, once `fill` has written it, part after part.
  void spread(Launch launch, std::vector<DirectGroup> groups, DirectPlaces places,
              const std::function<void(const at::Tensor&)>& fill);
  void sum(const Waiting& waiting, at::Tensor sums) const;
  c10::intrusive_ptr<c10d::Work> all_to_all(at::Tensor& received, at::Tensor& sent, Splits splits);
  Splits no_splits() const;

  int rank() const { return group_.getRank(); }
  int world_size() const { return group_.getSize(); }

  c10d::ProcessGroup& group_;
  Staging& staging_;
  MessageStatistics& statistics_;
  std::deque<Waiting> waiting_;
};

}  // namespace ddp_hooks
