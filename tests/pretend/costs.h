// What work takes on the pretended device, in virtual time (queues.h), and on the link that it is said to have.
#pragma once

#include <vector>

#include "memory.h"

namespace pretend {

// About those of an H100. Seconds, and bytes per second.
struct Costs {
  double launch = 5e-6;  // of the host, for a kernel or a copy
  double collective_launch = 20e-6;
  double kernel = 2e-6;  // of the device, at least
  double memory = 2.5e12;
  double latency = 30e-6;  // of a collective
  double link = 100e9 / 8;
  double hosts = 2;  // in the ring

  static Costs& get() {
    static Costs costs;
    return costs;
  }
  Cost of_kernel(const std::vector<Use>& uses) const {
    double bytes = 0;
    for (const Use& use : uses) bytes += static_cast<double>(use.bytes);
    return {.seconds = kernel + bytes / memory, .host_seconds = launch, .bytes = bytes};
  }
};

}  // namespace pretend
