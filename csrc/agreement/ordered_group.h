// A group whose collectives are started by completions of others, which come in any order and in any thread.
//
// On one group every rank has to start collectives in the same order. So a turn is taken where the ranks have an order,
// and what is ready before its turn is started by whoever is ready last before it. Nobody waits.
//
// Always holds: what starts, starts in the order of turns, once; of those taken before one fails, none starts after it.
// Thread-safety: any thread, but under no lock that `then` takes. Every rank must agree on: the order of turns.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "agreement/group_reference.h"

namespace ddp_hooks {

class OrderedGroup {
 public:
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  using Start = std::function<WorkPointer(c10d::Backend&)>;
  // Without a lock: the work, or what keeps it from being started.
  using Then = std::function<void(const WorkPointer&, const std::exception_ptr&)>;

  explicit OrderedGroup(c10::intrusive_ptr<c10d::Backend> group) : group_(std::move(group)) {}

  int64_t take_turn();
  // Here and now if it is this one's turn, and then those after it that are ready; otherwise later.
  void start(int64_t turn, Start start, Then then);
  // A turn will not be used, so none that was taken so far: other ranks may have used it, and would be ahead.
  void fail(const std::exception_ptr& error);

 private:
  struct Ready {
    Start start;
    Then then;
  };
  static void tell(const std::vector<Ready>& ready, const std::exception_ptr& error);
  void drop_turns(const std::exception_ptr& error);
  std::vector<Ready> take_dropped();

  const GroupReference<c10d::Backend> group_;
  std::mutex mutex_;
  int64_t next_to_take_ = 0;
  int64_t next_to_start_ = 0;
  std::map<int64_t, Ready> ready_;  // by turn; those that wait for one before them
  std::exception_ptr error_;        // what turns were dropped for last
};

}  // namespace ddp_hooks
