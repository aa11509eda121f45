#include "agreement/ordered_group.h"

namespace ddp_hooks {

int64_t OrderedGroup::take_turn() {
  std::lock_guard lock(mutex_);
  return next_to_take_++;
}

void OrderedGroup::start(int64_t turn, Start start, Then then) {
  // What is let go of, and told, is so without the lock.
  std::vector<std::pair<Ready, WorkPointer>> started;
  std::vector<Ready> dropped;
  std::exception_ptr error;
  {
    std::lock_guard lock(mutex_);
    ready_[turn] = {std::move(start), std::move(then)};
    for (auto next = ready_.find(next_to_start_); next != ready_.end(); next = ready_.find(next_to_start_)) {
      try {
        WorkPointer work = next->second.start(*group_);
        started.emplace_back(std::move(next->second), std::move(work));
        ready_.erase(next);
        ++next_to_start_;
      } catch (...) {
        drop_turns(std::current_exception());
      }
    }
    dropped = take_dropped();
    error = error_;
  }
  for (const auto& [ready, work] : started) ready.then(work, nullptr);
  tell(dropped, error);
}

void OrderedGroup::fail(const std::exception_ptr& error) {
  std::vector<Ready> dropped;
  {
    std::lock_guard lock(mutex_);
    drop_turns(error);
    dropped = take_dropped();
  }
  tell(dropped, error);
}

void OrderedGroup::drop_turns(const std::exception_ptr& error) {
  error_ = error;
  next_to_start_ = next_to_take_;
}

std::vector<OrderedGroup::Ready> OrderedGroup::take_dropped() {
  std::vector<Ready> dropped;
  while (!ready_.empty() && ready_.begin()->first < next_to_start_) {
    dropped.push_back(std::move(ready_.begin()->second));
    ready_.erase(ready_.begin());
  }
  return dropped;
}

void OrderedGroup::tell(const std::vector<Ready>& ready, const std::exception_ptr& error) {
  for (const Ready& one : ready) one.then(nullptr, error);
}

}  // namespace ddp_hooks
