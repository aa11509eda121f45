// Which units of a slice hold a non-zero, and if widths are asked for, which narrow forms hold them? The only dispatch
// point by device.
//
// A unit is a stretch of `unit_length` elements, in the order in which they are stored, such as a row of an embedding;
// the last one of a slice may be shorter. As in nonzero_scan.h a scan is started and its answer waited for, in two
// calls, and on the CPU the answer stands when start_unit_scan returns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/unit_scan.h"
#include "kernels/slice_copy.h"

namespace ddp_hooks {

using cpu::UnitScanResult;

// A scan that may be under way. Whoever starts it holds what is scanned until it was waited for, or is gone, which
// waits as well. Thread-safety: none.
class PendingUnitScan {
 public:
  PendingUnitScan();  // of nothing
  ~PendingUnitScan();
  PendingUnitScan(PendingUnitScan&&) noexcept;
  PendingUnitScan& operator=(PendingUnitScan&&) noexcept;

  // On CUDA it waits, the first time, for what was on the scan's stream before the scan and for the scan, and for
  // nothing later; no stream is synchronised.
  const UnitScanResult& wait();

 private:
  struct OnDevice;
  friend PendingUnitScan start_unit_scan(const SliceOfTensor& slice, int64_t unit_length, bool widths);
  friend PendingUnitScan start_unit_scan(const SliceOfTensor& slice, int64_t unit_length,
                                         const std::vector<uint64_t>& candidates, bool widths);

  UnitScanResult result_;
  std::unique_ptr<OnDevice> on_device_;  // null when the result stands
};

// The slice is unchanged until the answer stands (on CUDA: whoever changes it does so on the current stream or waits
// for that). On CUDA the scan goes to the current stream of its device; not while that is captured into a graph. At
// most 2^32 units, whose indices a result can hold.
PendingUnitScan start_unit_scan(const SliceOfTensor& slice, int64_t unit_length, bool widths = false);

// The same, on the CPU only, where all units but the `candidates`, a bit each, are known to be +0.0.
PendingUnitScan start_unit_scan(const SliceOfTensor& slice, int64_t unit_length,
                                const std::vector<uint64_t>& candidates, bool widths = false);

}  // namespace ddp_hooks
