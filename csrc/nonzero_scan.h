// Which slices of a flat tensor hold a non-zero? The only dispatch point by device.
//
// A scan is started and its answer waited for, in two calls, so that a device can scan while the host goes on. On the
// CPU the answer stands when start_scan returns, and waiting costs nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/nonzero_scan.h"

namespace ddp_hooks {

using cpu::ScanResult;

struct SliceRange {
  int64_t offset = 0;  // elements
  int64_t length = 0;  // elements; may be 0
};

// A scan that may be under way. Keeps the scanned tensor alive. Thread-safety: none.
class PendingScan {
 public:
  PendingScan();  // of nothing
  ~PendingScan();
  PendingScan(PendingScan&&) noexcept;
  PendingScan& operator=(PendingScan&&) noexcept;

  // One result for each range. On CUDA it waits, the first time, for what was on the scan's stream before the scan and
  // for the scan, and for nothing later; no stream is synchronised.
  const std::vector<ScanResult>& wait();

 private:
  struct OnDevice;
  friend PendingScan start_scan(const at::Tensor& flat, const std::vector<SliceRange>& ranges);

  std::vector<ScanResult> results_;
  std::unique_ptr<OnDevice> on_device_;  // null when the results stand
};

// `flat` is one-dimensional and contiguous, and unchanged until the answer stands (on CUDA: whoever changes it does so
// on the current stream or waits for that). On CUDA the scan goes to the current stream of the tensor's device: one
// pass, whatever the number of ranges. Not while that stream is captured into a graph.
PendingScan start_scan(const at::Tensor& flat, const std::vector<SliceRange>& ranges);

// One range, answered at once.
ScanResult nonzero_scan(const at::Tensor& flat, int64_t offset, int64_t length);

}  // namespace ddp_hooks
