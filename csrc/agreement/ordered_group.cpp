#include "agreement/ordered_group.h"

#include <stdexcept>
#include <string>

namespace ddp_hooks {
namespace {

struct Closed : std::runtime_error {
  explicit Closed(const std::string& error)
      : std::runtime_error(
            "ddp_hooks: coded messages, owners' sums and messages between hosts can no longer be sent "
            "because a step failed; if the process group still works, call state.close() and "
            "ddp_hooks.register(ddp) on every rank. The step's error: " +
            error) {}
};

// One group may close because another one has.
std::exception_ptr closed_by(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Closed&) {
    return error;
  } catch (const c10::Error& failed) {
    return std::make_exception_ptr(Closed(failed.what_without_backtrace()));
  } catch (const std::exception& failed) {
    return std::make_exception_ptr(Closed(failed.what()));
  } catch (...) {
    return std::make_exception_ptr(Closed("unknown error"));
  }
}

}  // namespace

int64_t OrderedGroup::take_turn() {
  std::lock_guard lock(mutex_);
  return next_to_take_++;
}

void OrderedGroup::start(int64_t turn, Start start, Then then) {
  // What is let go of, and told, is so without the lock.
  std::vector<std::pair<Ready, WorkPointer>> started;
  Dropped dropped;
  std::exception_ptr error;
  {
    std::lock_guard lock(mutex_);
    ready_[turn] = {std::move(start), std::move(then)};
    if (are_groups_kept()) close(std::make_exception_ptr(std::runtime_error("the interpreter is shutting down")));
    for (auto next = ready_.find(next_to_start_); !error_ && next != ready_.end(); next = ready_.find(next_to_start_)) {
      try {
        WorkPointer work = next->second.start(*group_);
        started.emplace_back(std::move(next->second), std::move(work));
        ready_.erase(next);
        ++next_to_start_;
      } catch (...) {
        close(std::current_exception());
      }
    }
    if (error_) dropped.swap(ready_);
    error = error_;
  }
  for (const auto& [ready, work] : started) ready.then(work, nullptr);
  tell(dropped, error);
}

std::exception_ptr OrderedGroup::fail(const std::exception_ptr& error) {
  Dropped dropped;
  std::exception_ptr told;
  {
    std::lock_guard lock(mutex_);
    close(error);
    dropped.swap(ready_);
    told = error_;
  }
  tell(dropped, told);
  return told;
}

bool OrderedGroup::has_failed() {
  std::lock_guard lock(mutex_);
  return error_ != nullptr;
}

void OrderedGroup::close(const std::exception_ptr& error) {
  if (error_) return;
  error_ = closed_by(error);
  group_.let_go();
}

void OrderedGroup::tell(const Dropped& dropped, const std::exception_ptr& error) {
  for (const auto& [turn, one] : dropped) one.then(nullptr, error);
}

}  // namespace ddp_hooks
