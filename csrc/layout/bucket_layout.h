// What lies where in DDP's buckets: what everything else counts in.
//
// Thread-safety: none; a layout is a value. Every rank must agree on all of it but for how it counts its devices; which
// buckets share one is agreed, because they may share a message. `hash` is how ranks notice that they disagree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/stretch.h"

namespace ddp_hooks {

struct ParameterSlice {
  uint32_t parameter = 0;
  int64_t offset = 0;  // elements
  int64_t length = 0;  // elements; may be 0
  // Elements that share an index of the parameter's first dimension; 0 where it has none.
  int64_t row_length = 0;
};

// A bucket's kind holds its dtype from this bit on, the type of its device (torch's number; 0 is the CPU) from that one
// on, the device's index below.
constexpr int kDtypeShift = 32;
constexpr int kDeviceTypeShift = 16;

struct BucketLayout {
  std::vector<ParameterSlice> slices;  // in the order of their offsets, without gaps
  int64_t numel = 0;
  int64_t element_bytes = 0;
  // Buckets of the same kind (dtype and device) may share a message.
  uint64_t kind = 0;
  // Sparse gradients have no slices to pick from; the bucket passes through whole.
  bool sparse = false;

  int64_t bytes() const { return numel * element_bytes; }
  bool is_on_cpu() const { return (kind >> kDeviceTypeShift & 0xffff) == 0; }
};

struct LayoutOfBuckets {
  std::vector<BucketLayout> buckets;
  size_t parameter_count = 0;
  uint64_t hash() const;
  // How many buckets have fewer bytes than that before them.
  uint32_t buckets_within(int64_t bytes) const;
};

// The parameters that lie within a stretch of a bucket, empty ones left out; a stretch ends where parameters do.
std::vector<ParameterSlice> parameters_in(const BucketLayout& layout, const Stretch& stretch);

}  // namespace ddp_hooks
