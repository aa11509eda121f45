#include "layout/bucket_layout.h"

#include <algorithm>

#include "layout/hash.h"

namespace ddp_hooks {

uint32_t LayoutOfBuckets::buckets_within(int64_t bytes) const {
  uint32_t count = 0;
  for (int64_t before = 0; count < buckets.size() && before < bytes; ++count) before += buckets[count].bytes();
  return count;
}

std::vector<ParameterSlice> parameters_in(const BucketLayout& layout, const Stretch& stretch) {
  auto slice =
      std::lower_bound(layout.slices.begin(), layout.slices.end(), stretch.offset,
                       [](const ParameterSlice& candidate, int64_t offset) { return candidate.offset < offset; });
  std::vector<ParameterSlice> found;
  for (; slice != layout.slices.end() && slice->offset < stretch.offset + stretch.length; ++slice) {
    if (slice->length > 0) found.push_back(*slice);
  }
  return found;
}

uint64_t LayoutOfBuckets::hash() const {
  Hash hash;
  hash.add(parameter_count);
  std::vector<uint64_t> devices;  // in the order in which they appear
  for (const BucketLayout& bucket : buckets) {
    hash.add(bucket.slices.size());
    hash.add(bucket.kind >> kDtypeShift);
    // Ranks may count their devices differently, but not share them out differently.
    const uint64_t device = bucket.kind & ((uint64_t{1} << kDtypeShift) - 1);
    const auto place = std::find(devices.begin(), devices.end(), device);
    hash.add((device >> kDeviceTypeShift) << kDeviceTypeShift | static_cast<uint64_t>(place - devices.begin()));
    if (place == devices.end()) devices.push_back(device);
    hash.add(static_cast<uint64_t>(bucket.element_bytes) * 2 + bucket.sparse);
    for (const ParameterSlice& slice : bucket.slices) {
      hash.add(slice.parameter);
      hash.add(static_cast<uint64_t>(slice.length));
      hash.add(static_cast<uint64_t>(slice.row_length));
    }
  }
  return hash.value();
}

}  // namespace ddp_hooks
