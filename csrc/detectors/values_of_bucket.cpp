#include "detectors/values_of_bucket.h"

#include <ATen/ATen.h>

namespace ddp_hooks {

void ValuesOfBucket::add(uint32_t slice, const at::Tensor& flat, BucketViews& views) {
  const ParameterSlice& place = layout_.slices[slice];
  at::Tensor gradient;
  if (views.is_detached(place.parameter)) gradient = views.find_or_fill(place.parameter);
  scanned_.push_back(slice);
  places_.push_back(gradient.defined() ? SliceOfTensor{gradient, 0, place.length}
                                       : SliceOfTensor{flat, place.offset, place.length});
}

void ValuesOfBucket::start() {
  scan_ = start_scan(places_);
}

UsageMask ValuesOfBucket::nonzero() {
  UsageMask found(layout_.slices.size());
  const std::vector<ScanResult>& results = scan_.wait();
  for (size_t i = 0; i < scanned_.size(); ++i) {
    if (results[i].any_nonzero) found.set(scanned_[i]);
  }
  return found;
}

void ValuesOfBucket::settle(const UsageMask& nonzero_anywhere, UsageMask& agreed, BucketViews& views) {
  const std::vector<ScanResult>& results = scan_.wait();
  // The sum of zeros of either sign depends on who adds it up; +0.0 is the same on every rank.
  for (size_t i = 0; i < scanned_.size(); ++i) {
    if (nonzero_anywhere.test(scanned_[i]) || !results[i].any_negative_zero) continue;
    places_[i].flat.narrow(0, places_[i].offset, places_[i].length).zero_();
  }
  for (uint32_t i = 0; i < layout_.slices.size(); ++i) {
    const size_t parameter = layout_.slices[i].parameter;
    if (nonzero_anywhere.test(i) || !agreed.test(parameter)) continue;
    agreed.clear(parameter);
    if (views.is_detached(parameter) && !views.has_gradient(parameter)) views.fill(parameter);
  }
}

}  // namespace ddp_hooks
