#include "queues.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>
#include <vector>

#include "trace.h"

namespace pretend {
namespace {

// Returns its number; where nothing is noted, that of the moment before.
uint64_t note(Moment moment, uint64_t before) {
  const uint64_t number = Trace::get().note(std::move(moment));
  return number > 0 ? number : before;
}

}  // namespace

void add(Passed& passed, const Passed& more) {
  for (const auto& [stream, count] : more) passed[stream] = std::max(passed[stream], count);
}

Queues& Queues::get() {
  static auto* const queues = new Queues();  // never destroyed: tensors may outlive everything
  return *queues;
}

Queues::Queues() : thread_([this] { run(); }) {}

void Queues::seed(uint64_t seed, double lateness) {
  std::lock_guard lock(mutex_);
  random_.seed(seed);
  lateness_ = lateness;
  constexpr std::array<double, 4> kProbabilities{0, 0.003, 0.01, 0.03};
  constexpr std::array<double, 3> kLongest{0.001, 0.004, 0.015};
  rest_probability_ = kProbabilities[random_() % kProbabilities.size()];
  longest_rest_seconds_ = kLongest[random_() % kLongest.size()];
}

Ticket Queues::put(StreamId id, Work work, const Cost& cost) {
  std::lock_guard lock(mutex_);
  Stream& stream = streams_[id];
  host_seconds_ += cost.host_seconds;
  stream.seconds = std::max(stream.seconds, host_seconds_) + cost.seconds;
  if (cost.seconds > 0) stream.moment = note({"work", id, cost}, stream.moment);
  stream.waiting.push_back(std::move(work));
  add(stream.passed, host_);
  stream.passed[id] = ++stream.put;
  put_.notify_all();
  return {id, stream.put, stream.passed, stream.seconds, stream.moment};
}

Ticket Queues::ticket(StreamId stream) {
  std::lock_guard lock(mutex_);
  const Stream& here = streams_[stream];
  return {stream, here.put, here.passed, std::max(here.seconds, host_seconds_), here.moment};
}

void Queues::wait(StreamId stream, const Ticket& ticket) {
  {
    std::lock_guard lock(mutex_);
    Stream& here = streams_[stream];
    add(here.passed, ticket.passed);
    here.seconds = std::max(here.seconds, ticket.seconds);
    // What memory waits for before it is taken again holds nobody up.
    const bool matters = stream >= 0 && ticket.stream != stream && ticket.moment > 0;
    if (matters) here.moment = note({.what = "wait", .stream = stream, .after = ticket.moment}, here.moment);
  }
  if (ticket.stream == stream || has_passed(ticket.stream, ticket.count)) return;
  put(stream, [this, from = ticket.stream, count = ticket.count] { return has_passed(from, count); });
}

bool Queues::has_passed(StreamId stream, uint64_t count) {
  std::lock_guard lock(mutex_);
  return streams_[stream].through >= count;
}

bool Queues::is_through(const Ticket& ticket) {
  std::lock_guard lock(mutex_);
  if (streams_[ticket.stream].through < ticket.count) return false;
  add(host_, ticket.passed);
  return true;
}

Passed Queues::known_to_host() {
  std::lock_guard lock(mutex_);
  return host_;
}

void Queues::synchronize(const Ticket& ticket) {
  std::unique_lock lock(mutex_);
  through_.wait(lock, [&] { return streams_[ticket.stream].through >= ticket.count; });
  add(host_, ticket.passed);
  host_seconds_ = std::max(host_seconds_, ticket.seconds);
  note({.what = "host waits", .stream = ticket.stream, .after = ticket.moment}, 0);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Queues::fail(const std::string& what) {
  std::lock_guard lock(mutex_);
  if (!error_) error_ = std::make_exception_ptr(std::logic_error("pretend: " + what));
}

void Queues::synchronize_all() {
  std::vector<Ticket> tickets;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, stream] : streams_) {
      tickets.push_back({id, stream.put, stream.passed, stream.seconds, stream.moment});
    }
  }
  for (const Ticket& ticket : tickets) synchronize(ticket);
}

void Queues::stop() {
  synchronize_all();
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(stopped_, true)) return;
    put_.notify_all();
  }
  thread_.join();
}

void Queues::run() {
  constexpr std::chrono::microseconds kPause(20);
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    const bool idle =
        std::all_of(streams_.begin(), streams_.end(), [](const auto& s) { return s.second.waiting.empty(); });
    if (idle) {
      put_.wait(lock);
    } else if (!advance(lock)) {
      put_.wait_for(lock, kPause);
    }
  }
}

// Whether some stream has gone on.
bool Queues::advance(std::unique_lock<std::mutex>& lock) {
  std::vector<Stream*> streams;  // a map's nodes stay where they are
  for (auto& [id, stream] : streams_) {
    if (!stream.waiting.empty()) streams.push_back(&stream);
  }
  std::shuffle(streams.begin(), streams.end(), random_);
  const Clock::time_point now = Clock::now();
  std::uniform_real_distribution<> draw;
  for (Stream* stream : streams) {
    if (stream->rests_until > now || draw(random_) < lateness_) continue;
    if (draw(random_) < rest_probability_) {
      const std::chrono::duration<double> rest(draw(random_) * longest_rest_seconds_);
      stream->rests_until = now + std::chrono::duration_cast<Clock::duration>(rest);
      continue;
    }
    Work& work = stream->waiting.front();  // as a deque's elements do while others are put behind them
    bool done = true;
    lock.unlock();
    try {
      done = work();
    } catch (...) {
      const std::lock_guard guard(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    if (done) work = nullptr;  // what it holds goes without the lock
    lock.lock();
    if (!done) continue;
    stream->waiting.pop_front();
    ++stream->through;
    through_.notify_all();
    return true;
  }
  return false;
}

}  // namespace pretend
