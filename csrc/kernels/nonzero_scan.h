// Which slices hold a non-zero? The only dispatch point by device.
//
// A scan is started and its answer waited for, in two calls, so that a device can scan while the host goes on. On the
// CPU the answer stands when start_scan returns, and waiting costs nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/unit_scan.h"
#include "kernels/slice_copy.h"

namespace ddp_hooks {

using ScanResult = cpu::UnitFindings;  // each slice is a unit

// A scan that may be under way. Whoever starts it holds what is scanned until it was waited for, or is gone, which
// waits as well. Thread-safety: none.
class PendingScan {
 public:
  PendingScan();  // of nothing
  ~PendingScan();
  PendingScan(PendingScan&&) noexcept;
  PendingScan& operator=(PendingScan&&) noexcept;

  // One result for each slice. On CUDA it waits, the first time, for what was on the scan's stream before the scan and
  // for the scan, and for nothing later; no stream is synchronised.
  const std::vector<ScanResult>& wait();

 private:
  struct OnDevice;
  friend PendingScan start_scan(const std::vector<SliceOfTensor>& slices);

  std::vector<ScanResult> results_;
  std::unique_ptr<OnDevice> on_device_;  // null when the results stand
};

// The slices are of one dtype and device, and unchanged until the answer stands (on CUDA: whoever changes them does so
// on the current stream or waits for that). On CUDA the scan goes to the current stream of their device: one pass,
// whatever the number of slices. Not while that stream is captured into a graph.
PendingScan start_scan(const std::vector<SliceOfTensor>& slices);

}  // namespace ddp_hooks
