// What the host has asked of the pretended device, for comparing hooks by it where time says nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace pretend {

struct Counts {
  std::atomic<uint64_t> launches{0};      // kernels and copies
  std::atomic<uint64_t> allocations{0};   // of its memory
  std::atomic<uint64_t> events{0};        // recorded
  std::atomic<uint64_t> stream_waits{0};  // of a stream for an event or a collective
  std::atomic<uint64_t> host_waits{0};    // of the host for the device
  std::atomic<uint64_t> collectives{0};
  std::atomic<uint64_t> collective_bytes{0};  // that they were given

  // The same by operation and number of ranks.
  using ByGroup = std::map<std::pair<std::string, int>, uint64_t>;
  void add_collective(const std::string& operation, int ranks, uint64_t bytes) {
    ++collectives;
    collective_bytes += bytes;
    const std::lock_guard lock(mutex_);
    bytes_by_group_[{operation, ranks}] += bytes;
  }
  ByGroup bytes_by_group() {
    const std::lock_guard lock(mutex_);
    return bytes_by_group_;
  }

  static Counts& get() {
    static Counts counts;
    return counts;
  }

 private:
  std::mutex mutex_;
  ByGroup bytes_by_group_;
};

}  // namespace pretend
