// Every rank's mask -> the agreed mask: a bitwise OR over all ranks, asynchronous, on groups of its own.
//
// A message is [x, ~x] for each of three header words, then the mask, in plain words or compressed. OR(x) and OR(~x)
// share a bit exactly when two ranks sent a different x. So the collectives that merge the masks also notice, on every
// rank alike, that ranks drifted apart (another number of exchanges so far, another configuration, another layout of
// the buckets), and whether all ranks sent the same mask.
//
// The OR is made by all-gathers. A gather of messages this small takes half the hops of a ring all-reduce, and fewer
// turns of the threads that run it. In a large world the ranks form a grid, and one gather along each of its axes takes
// the place of one over all: the hops are then the sum of the axes' lengths instead of their product. In between a rank
// ORs what it has gathered; where it is asked who set a bit, it hands on all of it, and ORs in the end. Where ranks of
// a host add up, the first axis is the host, and masks of units are ORed there in any case, so that hosts set bits.
//
// Always holds: an exchange that every rank has started comes to its end by itself, whether or not anybody waits for
// it: a gather along the next axis is started by the completion of the one before. Otherwise a rank that waits for the
// exchange would need the others to wait for it, too, and they may stand in some other collective that waits for this
// rank. Along each axis exchanges go in the order in which they were started.
// Thread-safety: the engine locks; completions run in the process groups' threads and touch the line only.
// Every rank must agree on: the order of exchanges, the size of each mask, the grid.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "agreement/control_groups.h"
#include "layout/contributors.h"
#include "layout/usage_mask.h"

namespace ddp_hooks {

// What two ranks must share for their exchanges to belong together.
struct ExchangeContext {
  uint64_t configuration = 0;  // policy, world size, parameters: fixed when the state is made
  uint64_t layout = 0;         // LayoutOfBuckets::hash()
  uint64_t phase = 0;          // 0 for `skip_unused`'s masks, or that of a bucket's units
};

constexpr uint64_t units_phase(uint32_t bucket) {
  return uint64_t{bucket} + 1;
}

// A message on its way along the axes, as one rank sees it.
struct MaskInTransit {
  at::Tensor message;  // what this rank knows so far, which it sends along the axis
  at::Tensor gathered;
  c10::intrusive_ptr<c10d::Work> work;
  size_t axis = 0;       // of the gather under way; the number of axes when all are through
  bool arrived = false;  // that gather is back, and the next one has yet to be started
  std::exception_ptr error;
  size_t words = 0;          // of one rank's message
  bool keeps_apart = false;  // messages go on as they came, in the order of the ranks, so that all are known in the end
  std::optional<UsageMask> units;  // where masks travel compressed: what this rank knows so far
};

class ExchangeLine;

class PendingExchange {
 public:
  // What is handed to collectives.
  int64_t payload_bytes() const;

  // Blocks until every rank has sent its mask; call it once, without the GIL.
  // Throws c10::Error, on every rank, when the ranks drifted apart; the process group's error when a rank is gone.
  UsageMask wait();

  // After wait():
  // Whether every rank sent the same mask, whatever it piggybacked on it.
  bool masks_were_identical() const { return identical_; }
  // The OR of what every rank piggybacked on its mask.
  const UsageMask& piggybacked() const { return piggybacked_; }
  // Who set each bit of the mask, where that was asked for: ranks, or hosts where ranks of a host add up and the mask
  // is a compressed one.
  const Contributors& contributors() const { return contributors_; }
  // Of a compressed mask: how many words the longest needed that was sent, or had to be on its way along the axes. If
  // that is more than there was room for, nobody knows the agreed mask, and what wait() returned is not it.
  size_t needed_words() const { return needed_words_; }

 private:
  friend class MaskExchange;
  std::string describe_drift() const;

  std::shared_ptr<ExchangeLine> line_;
  std::shared_ptr<MaskInTransit> transit_;
  size_t mask_size_ = 0;
  size_t piggybacked_size_ = 0;
  uint64_t sequence_ = 0;
  ExchangeContext context_;
  bool identical_ = false;
  UsageMask piggybacked_;
  Contributors contributors_;
  size_t needed_words_ = 0;
};

class MaskExchange {
 public:
  explicit MaskExchange(std::shared_ptr<const ControlGroups> groups);

  int world_size() const;
  // `piggybacked` is merged like the mask, and is no part of it. `asks_who`: the contributors are wanted, too; in one
  // gather they cost nothing, in a grid messages grow from axis to axis. Every rank must agree on it.
  std::unique_ptr<PendingExchange> start(const UsageMask& local, const UsageMask& piggybacked, bool asks_who,
                                         const ExchangeContext& context);
  // Every rank must agree on `capacity_words`, the room that there is for the compressed mask.
  std::unique_ptr<PendingExchange> start_compressed(UsageMask local, size_t capacity_words, bool asks_who,
                                                    const ExchangeContext& context);

 private:
  std::unique_ptr<PendingExchange> prepare(const UsageMask& local, size_t words, bool asks_who,
                                           const ExchangeContext& context);

  const std::shared_ptr<ExchangeLine> line_;
  uint64_t started_ = 0;
};

}  // namespace ddp_hooks
