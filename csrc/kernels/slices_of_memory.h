// Slices of a device's memory, as the functions of DeviceKernels take them, whatever device that is.
//
// Thread-safety: none; they are values, and keep no memory alive.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp_hooks {

// A stretch of device memory; both numbers are multiples of the element's size.
struct SliceOfMemory {
  char* address = nullptr;
  int64_t bytes = 0;
};

// A slice of more than 0 bytes, in units; the last one may be shorter. All are multiples of the element's size.
struct UnitsOfMemory {
  const char* address = nullptr;
  int64_t bytes = 0;
  int64_t unit_bytes = 0;

  int64_t count() const { return (bytes - 1) / unit_bytes + 1; }
};

// To a sum.
struct Contribution {
  int64_t offset = 0;  // bytes into what was received
  bool own = false;    // what lies in the sum's slice itself instead
};

// A slice that is to be filled with the sum of some contributions, one at least.
struct SliceToSum {
  char* address = nullptr;
  int64_t bytes = 0;
  const Contribution* terms = nullptr;
  size_t count = 0;
};

}  // namespace ddp_hooks
