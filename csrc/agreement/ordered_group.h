// A group whose collectives are started by completions of others, which come in any order and in any thread.
//
// On one group every rank has to start collectives in the same order. So a turn is taken where the ranks have an order.
// If a collective is ready before its turn, the thread that starts the last one before it starts it as well. Nobody
// waits.
//
// When a turn will not be used here, other ranks may have used it, and would take whatever comes next for it. So
// nothing starts any more then, and the group closes, whereupon the others fail at once. Whoever waits for a turn is
// told what to do about it, in this step and in later ones, which may be under way already.
//
// Always holds: what starts, starts in the order of turns, once; after a failure nothing does. Thread-safety: any
// thread, but under no lock that `then` takes. Every rank must agree on: the order of turns.
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
  // A turn that was taken will not be used, or its collective has failed. Returns what those hear whose turns come
  // later, which is to be told of this one, too.
  std::exception_ptr fail(const std::exception_ptr& error);
  bool has_failed();

 private:
  struct Ready {
    Start start;
    Then then;
  };
  // What waited for its turn, to be told without the lock.
  using Dropped = std::map<int64_t, Ready>;
  static void tell(const Dropped& dropped, const std::exception_ptr& error);
  void close(const std::exception_ptr& error);

  GroupReference<c10d::Backend> group_;
  std::mutex mutex_;
  int64_t next_to_take_ = 0;
  int64_t next_to_start_ = 0;
  std::map<int64_t, Ready> ready_;  // by turn
  std::exception_ptr error_;        // once set, nothing starts
};

}  // namespace ddp_hooks
