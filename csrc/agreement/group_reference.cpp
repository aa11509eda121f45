#include "agreement/group_reference.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace ddp_hooks {
namespace {

// How long what was held by `after` may take to go once `after` itself is gone. Others may hold the group for as long
// as they like: Python's own references are dropped without the GIL.
constexpr std::chrono::milliseconds kGrace{1000};
constexpr std::chrono::milliseconds kShortestPause{1};
constexpr std::chrono::milliseconds kLongestPause{250};

// A group that is held until others have let go of it.
struct Waiting {
  AnyGroup group;
  std::vector<std::weak_ptr<void>> after;
};

struct Departures {
  std::mutex mutex;
  std::condition_variable changed;
  int under_way = 0;
  bool keeps = false;
  // By address: one thread for each group, however many modules over it go.
  std::map<const void*, std::shared_ptr<Waiting>> waiting;
};

// Never destroyed, because threads outlive static objects; made anew in a forked child, where the mutex may be locked
// for good. Made when the library is loaded, because a child would wait for a thread that was about to make it.
Departures* departures = nullptr;

void begin_anew() {
  departures = new Departures;
}

[[maybe_unused]] const bool is_ready = [] {
  begin_anew();
  pthread_atfork(nullptr, nullptr, begin_anew);
  return true;
}();

Departures& all_departures() {
  return *departures;
}

void keep(AnyGroup& group) {
  (void)group.release();
}

bool are_gone(const std::vector<std::weak_ptr<void>>& after) {
  return std::all_of(after.begin(), after.end(), [](const auto& one) { return one.expired(); });
}

// False when the group is to be kept instead of dropped.
bool wait_to_be_last(const Waiting& waiting, Departures& all) {
  std::unique_lock lock(all.mutex);
  auto pause = kShortestPause;
  auto last_seen = std::chrono::steady_clock::now();
  size_t number_after = 0;
  while (true) {
    const auto now = std::chrono::steady_clock::now();
    if (!are_gone(waiting.after) || waiting.after.size() != number_after) {
      last_seen = now;
      if (waiting.after.size() != number_after) pause = kShortestPause;
      number_after = waiting.after.size();
    } else if (waiting.group.use_count() == 1 || now > last_seen + kGrace) {
      // From here on nobody else waits for this group with this thread.
      all.waiting.erase(waiting.group.get());
      return true;
    } else {
      pause = kShortestPause;
    }
    if (all.changed.wait_for(lock, pause, [&] { return all.keeps; })) return false;
    pause = std::min(2 * pause, kLongestPause);
  }
}

bool begin_departure(Departures& all) {
  std::lock_guard lock(all.mutex);
  if (all.keeps) return false;
  all.under_way += 1;
  return true;
}

void end_departure(Departures& all) {
  std::lock_guard lock(all.mutex);
  all.under_way -= 1;
  all.changed.notify_all();
}

// Without a thread the group is kept: one that stays open is better than a process that does not end.
template <typename Function>
bool run_in_a_thread(const Function& function) {
  try {
    std::thread(function).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace

void let_go(AnyGroup group, pid_t process) {
  Departures& all = all_departures();
  if (process != getpid() || !begin_departure(all)) return keep(group);
  // Shared, so that a thread that cannot be started does not take the reference with it.
  const auto held = std::make_shared<AnyGroup>(std::move(group));
  const bool started = run_in_a_thread([held, &all] {
    held->reset();
    end_departure(all);
  });
  if (!started) {
    keep(*held);
    end_departure(all);
  }
}

void let_go_after(AnyGroup group, std::weak_ptr<void> after, pid_t process) {
  Departures& all = all_departures();
  if (process != getpid()) return keep(group);
  std::unique_lock lock(all.mutex);
  std::shared_ptr<Waiting>& waiting = all.waiting[group.get()];
  if (waiting != nullptr) {
    waiting->after.push_back(std::move(after));
    // Not the last reference, since somebody waits with one already.
    group.reset();
    return;
  }
  waiting = std::make_shared<Waiting>(Waiting{std::move(group), {std::move(after)}});
  const auto held = waiting;
  lock.unlock();
  // Where no thread is to be had, the group stays where it is: kept.
  run_in_a_thread([held, &all] {
    if (!wait_to_be_last(*held, all) || !begin_departure(all)) return keep(held->group);
    held->group.reset();
    end_departure(all);
  });
}

bool wait_until_gone(std::chrono::milliseconds limit) {
  Departures& all = all_departures();
  std::unique_lock lock(all.mutex);
  return all.changed.wait_for(lock, limit, [&] { return all.under_way == 0; });
}

void keep_groups_from_now_on() {
  Departures& all = all_departures();
  std::lock_guard lock(all.mutex);
  all.keeps = true;
  all.changed.notify_all();
}

bool are_groups_kept() {
  Departures& all = all_departures();
  std::lock_guard lock(all.mutex);
  return all.keeps;
}

}  // namespace ddp_hooks
