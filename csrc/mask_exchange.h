// Every rank's mask -> the agreed mask: one small bitwise OR over all ranks, asynchronous, on a group of its own.
//
// A message is [x, ~x] for each of three header words, then the mask. OR(x) and OR(~x) share a bit exactly when two
// ranks sent a different x. So the same collective that merges the masks also notices, on every rank alike, that ranks
// drifted apart (another number of exchanges so far, another configuration, another layout of the buckets), and whether
// all ranks sent the same mask.
//
// Always holds: exchanges finish in the order in which they were started. Thread-safety: none; the engine locks.
// Every rank must agree on: the order of exchanges, and the size of each mask.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "usage_mask.h"

namespace ddp_hooks {

// What two ranks must share for their exchanges to belong together.
struct ExchangeContext {
  uint64_t configuration = 0;  // policy, world size, parameters: fixed when the state is made
  uint64_t layout = 0;         // LayoutOfBuckets::hash()
  uint64_t phase = 0;          // 0 for the graph detector's masks, bucket + 1 for the values detector's
};

class PendingExchange {
 public:
  const UsageMask& local() const { return local_; }
  int64_t message_bytes() const { return static_cast<int64_t>(message_.nbytes()); }

  // After wait(): whether every rank sent the same mask.
  bool masks_were_identical() const { return identical_; }

  // Blocks until every rank has sent its mask; call it once, without the GIL.
  // Throws c10::Error, on every rank, when the ranks drifted apart; the process group's error when a rank is gone.
  UsageMask wait();

 private:
  friend class MaskExchange;
  std::string describe_drift();

  c10::intrusive_ptr<c10d::ProcessGroup> control_group_;
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor message_;
  UsageMask local_;
  uint64_t sequence_ = 0;
  ExchangeContext context_;
  bool identical_ = false;
};

class MaskExchange {
 public:
  explicit MaskExchange(c10::intrusive_ptr<c10d::ProcessGroup> control_group)
      : control_group_(std::move(control_group)) {}

  std::unique_ptr<PendingExchange> start(UsageMask local, const ExchangeContext& context);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> control_group_;
  uint64_t started_ = 0;
};

}  // namespace ddp_hooks
