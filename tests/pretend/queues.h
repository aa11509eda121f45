// A device that is pretended: streams are queues, and a thread runs what is on them in any legal order.
//
// What is put on one stream runs in order; between streams only what waits for a ticket is ordered. Which stream goes
// on next, and how long it is left alone, a generator with a seed draws: so a missing wait shows sooner or later, in a
// round that the seed gives again, as far as the host is as fast again. Mostly a stream is left alone for as long as a
// few launches take, and now and then for so long that the host is in its next step.
//
// A piece of work is called until it says that it is done, so that one that waits for other processes, a collective,
// does not keep the other streams.
//
// And whatever runs when: with each piece of work goes what has run by then on every stream, however late those are. It
// follows from waits alone. memory.h holds uses of memory against that.
//
// There is a virtual time, too, which is counted when work is put somewhere, and so is the same in every run. A piece
// of work begins when what it waits for has ended, and not before the host has put it there; it takes as long as
// whoever puts it says (costs.h). The host's own time is what its launches take, and what it waits for. Timed events
// tell it.
//
// Always holds: what was put on a stream runs in the end. Thread-safety: all functions may be called from any thread;
// work runs in the device's own thread, without the GIL, and may call them, too, but for synchronize.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace pretend {

using StreamId = int64_t;
using Work = std::function<bool()>;  // whether it is done

// What a piece of work takes, in virtual time.
struct Cost {
  double seconds = 0;       // on its stream
  double host_seconds = 0;  // until the host has put it there
  double bytes = 0;         // that it moves; of a collective, that this rank gives it
  std::string collective;   // its operation; empty if it is none
  int ranks = 1;            // of the collective
};

// How many pieces of work have run on each stream, at least.
using Passed = std::map<StreamId, uint64_t>;
void add(Passed& passed, const Passed& more);

// A place on a stream: everything that was put there before.
struct Ticket {
  StreamId stream = 0;
  uint64_t count = 0;
  Passed passed;        // when this has
  double seconds = 0;   // the virtual time then
  uint64_t moment = 0;  // the last one on the stream that was noted (trace.h)
};

class Queues {
 public:
  static Queues& get();

  // From now on a stream that could go on is left alone with that probability, each time; and it rests with one that is
  // drawn, for as long as is drawn.
  void seed(uint64_t seed, double lateness);

  Ticket put(StreamId stream, Work work, const Cost& cost = {});
  Ticket ticket(StreamId stream);
  void wait(StreamId stream, const Ticket& ticket);  // what is put on the stream from now on runs after the ticket
  // The host asks. What it knows to have run, all that it puts anywhere from then on runs after.
  bool is_through(const Ticket& ticket);
  Passed known_to_host();
  // Blocks the calling thread, which must not hold the GIL; throws what some work threw, or what was found wrong.
  void synchronize(const Ticket& ticket);
  void synchronize_all();
  void fail(const std::string& what);
  void stop();  // everything has run, nothing may be put any more

 private:
  using Clock = std::chrono::steady_clock;
  struct Stream {
    std::deque<Work> waiting;
    uint64_t put = 0;
    uint64_t through = 0;
    Passed passed;  // when everything that was put here has
    double seconds = 0;
    uint64_t moment = 0;
    Clock::time_point rests_until{};
  };

  Queues();
  void run();
  bool advance(std::unique_lock<std::mutex>& lock);
  bool has_passed(StreamId stream, uint64_t count);

  std::mutex mutex_;
  std::condition_variable put_, through_;
  std::map<StreamId, Stream> streams_;
  Passed host_;
  double host_seconds_ = 0;
  std::mt19937_64 random_;
  double lateness_ = 0.3;
  double rest_probability_ = 0;
  double longest_rest_seconds_ = 0;
  bool stopped_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace pretend
