// What a program asks of the device, of its links and of the other ranks, in the order in which the host comes to it.
//
// Queues (queues.h) note what takes virtual time and what waits for what; the ranges that the hook names for profilers
// tell when it starts an exchange on the host and when it waits for one. benchmarks/tools/virtual_time.py plays a trace
// for several ranks, so that collectives wait for the last of them. Only what the program does decides the order, so a
// trace is the same in every run.
//
// Thread-safety: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "queues.h"

namespace pretend {

struct Moment {
  std::string what;  // "work", "wait" of a stream, "host waits", "masks start", "masks wait"
  StreamId stream = 0;
  Cost cost;            // of a piece of work
  uint64_t number = 0;  // of this moment; each has another
  uint64_t after = 0;   // of a wait: the last moment that it waits for
};

class Trace {
 public:
  static Trace& get();
  void begin();
  // What was noted since then.
  std::vector<Moment> end();
  // Returns its number, or 0 if nothing is noted now.
  uint64_t note(Moment moment);
};

}  // namespace pretend
