// Which units of some slices hold a non-zero? The only place that chooses by device for this.
//
// A unit is a stretch of `unit_length` elements, in the order in which they are stored, such as a row of an embedding,
// or the whole slice; the last one of a slice may be shorter. Scans are started and their answers waited for, in two
// calls, so that a device can scan while the host goes on. On the CPU the answers stand when start_unit_scan returns,
// and waiting costs nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/cpu/unit_scan.h"
#include "kernels/slice_copy.h"

namespace ddp_hooks {

using cpu::UnitScanResult;

struct UnitsToScan {
  SliceOfTensor slice;
  int64_t unit_length = 0;
  // On the CPU only: all units but these, a bit each, are known to be +0.0.
  std::optional<std::vector<uint64_t>> candidates;
};

// A scan that may be under way. Whoever starts it holds what is scanned until it was waited for, or is gone, which
// waits as well. Thread-safety: none.
class PendingUnitScan {
 public:
  PendingUnitScan();  // of nothing
  ~PendingUnitScan();
  PendingUnitScan(PendingUnitScan&&) noexcept;
  PendingUnitScan& operator=(PendingUnitScan&&) noexcept;

  // One result for each slice. On CUDA it waits, the first time, for what was on the scan's stream before the scan and
  // for the scan, and for nothing later; no stream is synchronised.
  const std::vector<UnitScanResult>& wait();

 private:
  struct OnDevice;
  friend PendingUnitScan start_unit_scan(const std::vector<UnitsToScan>& scans);

  std::vector<UnitScanResult> results_;
  std::unique_ptr<OnDevice> on_device_;  // null when the results stand
};

// The slices are of one dtype and device, and unchanged until the answer stands (on CUDA: whoever changes them does so
// on the current stream or waits for that). On CUDA the scan goes to the current stream of their device; not while that
// is captured into a graph. At most 2^32 units a slice, whose indices a result can hold.
PendingUnitScan start_unit_scan(const std::vector<UnitsToScan>& scans);

}  // namespace ddp_hooks
