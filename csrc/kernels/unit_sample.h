// How much of a slice is zero, by a sample of its units? The only place that chooses by device for this.
//
// Of up to 64 units, evenly spread over the slice; a unit counts as zero where all of its elements are +0.0 or -0.0. On
// the CPU a glance at the beginnings of 8 of them comes first, and where none is zero the answer is no: of a dense
// gradient that reads some cache lines. A device is asked about all slices in one go, because a launch costs it more
// than what it reads. As in unit_scan.h a sample is started and its answer waited for, in two calls, and on the CPU the
// answer stands when start_unit_sample returns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/slice_copy.h"

namespace ddp_hooks {

// A slice in units of so many elements; the last one may be shorter.
struct UnitsOfSlice {
  SliceOfTensor slice;
  int64_t unit_length = 0;
};

// A sample that may still be being taken. Keeps nothing of what is looked at alive. Thread-safety: none.
class PendingUnitSample {
 public:
  PendingUnitSample();  // of nothing
  ~PendingUnitSample();
  PendingUnitSample(PendingUnitSample&&) noexcept;
  PendingUnitSample& operator=(PendingUnitSample&&) noexcept;

  // For each slice, which fraction of its sampled units is zero. Waits as PendingUnitScan::wait does.
  const std::vector<double>& wait();

 private:
  struct OnDevice;
  friend PendingUnitSample start_unit_sample(const std::vector<UnitsOfSlice>& slices);

  std::vector<double> zero_fractions_;
  std::unique_ptr<OnDevice> on_device_;  // null when the answer stands
};

// The slices have an element at least, are of one dtype and device, and unchanged until the answer stands (on CUDA:
// whoever changes them does so on the current stream or waits for that). On CUDA the sample is taken on the current
// stream of their device, by one launch for any number of slices that a bucket has. Not while that stream is captured
// into a graph.
PendingUnitSample start_unit_sample(const std::vector<UnitsOfSlice>& slices);

}  // namespace ddp_hooks
