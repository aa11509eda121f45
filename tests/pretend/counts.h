// What the host has asked of the pretended device, for comparing hooks by it where time says nothing.
#pragma once

#include <atomic>
#include <cstdint>

namespace pretend {

struct Counts {
  std::atomic<uint64_t> launches{0};      // kernels and copies
  std::atomic<uint64_t> allocations{0};   // of its memory
  std::atomic<uint64_t> events{0};        // recorded
  std::atomic<uint64_t> stream_waits{0};  // of a stream for an event or a collective
  std::atomic<uint64_t> host_waits{0};    // of the host for the device
  std::atomic<uint64_t> collectives{0};
  std::atomic<uint64_t> collective_bytes{0};  // that they were given

  static Counts& get() {
    static Counts counts;
    return counts;
  }
};

}  // namespace pretend
