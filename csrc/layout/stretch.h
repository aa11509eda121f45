// A stretch of something that lies in memory as a whole: what plans are made of.
//
// Thread-safety: none; it is a value. Every rank must agree on all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp_hooks {

struct Stretch {
  size_t place = 0;    // which bucket, or which gradient of a bucket
  int64_t offset = 0;  // elements
  int64_t length = 0;  // elements, > 0

  int64_t end() const { return offset + length; }
  // Whether `next` begins where this ends.
  bool continues_in(const Stretch& next) const { return place == next.place && end() == next.offset; }
};

// Adds `next` at the end: to the last one if that continues in it.
template <typename AnyStretch>
void append(std::vector<AnyStretch>& stretches, const AnyStretch& next) {
  if (!stretches.empty() && stretches.back().continues_in(next)) {
    stretches.back().length += next.length;
  } else {
    stretches.push_back(next);
  }
}

}  // namespace ddp_hooks
