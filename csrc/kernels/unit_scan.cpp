#include "kernels/unit_scan.h"

#include <c10/util/Exception.h>

#include <limits>

#include "kernels/devices.h"

#ifdef DDP_HOOKS_WITH_CUDA
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "kernels/cuda/unit_scan.h"
#include "kernels/cuda/units.h"
#include "kernels/device_answer.h"
#endif

namespace ddp_hooks {
namespace {

constexpr int64_t kMostUnits = int64_t{std::numeric_limits<uint32_t>::max()} + 1;

int64_t count_units(const SliceOfTensor& slice, int64_t unit_length) {
  check_range(slice.flat, slice.offset, slice.length);
  TORCH_CHECK(unit_length > 0, "ddp_hooks: expected units of at least one element, received unit_length ", unit_length);
  const int64_t units = slice.length == 0 ? 0 : (slice.length - 1) / unit_length + 1;
  TORCH_CHECK(units <= kMostUnits, "ddp_hooks: expected at most ", kMostUnits, " units, received ", units);
  return units;
}

}  // namespace

#ifdef DDP_HOOKS_WITH_CUDA

struct PendingUnitScan::OnDevice {
  int64_t units;
  DeviceAnswer answer;
};

#else

struct PendingUnitScan::OnDevice {};

#endif

PendingUnitScan::PendingUnitScan() = default;
PendingUnitScan::~PendingUnitScan() = default;
PendingUnitScan::PendingUnitScan(PendingUnitScan&&) noexcept = default;
PendingUnitScan& PendingUnitScan::operator=(PendingUnitScan&&) noexcept = default;

const UnitScanResult& PendingUnitScan::wait() {
#ifdef DDP_HOOKS_WITH_CUDA
  if (on_device_) {
    result_ = cuda::read_bitmaps(on_device_->answer.wait(), on_device_->units);
    on_device_.reset();
  }
#endif
  return result_;
}

PendingUnitScan start_unit_scan(const SliceOfTensor& slice, int64_t unit_length, bool widths) {
  PendingUnitScan scan;
  const int64_t units = count_units(slice, unit_length);
  check_device(slice.flat.device());
  const ElementType type = element_type_of(slice.flat);
  if (units == 0) return scan;
#ifdef DDP_HOOKS_WITH_CUDA
  const c10::Device device = slice.flat.device();
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    check_aligned(slice.flat);
    const int64_t element_size = slice.flat.element_size();
    const c10::Stream stream = current_stream(device);
    slice.flat.record_stream(stream);
    scan.on_device_.reset(new PendingUnitScan::OnDevice{units, {device, 2 * cuda::words_of_bitmap(units)}});
    DeviceAnswer& answer = scan.on_device_->answer;
    // A unit may be said to be longer than the slice, in as many bytes as no number counts.
    const char* error = cuda::unit_scan({address_of(slice), slice.length * element_size},
                                        std::min(unit_length, slice.length) * element_size, type, answer.device_words(),
                                        answer.host_words(), current_stream_handle(device));
    answer.started_on(stream);
    TORCH_CHECK(error == nullptr, "ddp_hooks: CUDA could not scan gradients: ", error);
    return scan;
  }
#endif
  scan.result_ = cpu::unit_scan(address_of(slice), slice.length, unit_length, type, widths);
  return scan;
}

PendingUnitScan start_unit_scan(const SliceOfTensor& slice, int64_t unit_length,
                                const std::vector<uint64_t>& candidates, bool widths) {
  PendingUnitScan scan;
  const int64_t units = count_units(slice, unit_length);
  TORCH_CHECK(slice.flat.is_cpu(), "ddp_hooks: expected candidates of a gradient on the CPU, received one on ",
              slice.flat.device());
  const ElementType type = element_type_of(slice.flat);
  if (units > 0) scan.result_ = cpu::unit_scan(address_of(slice), slice.length, unit_length, type, candidates, widths);
  return scan;
}

}  // namespace ddp_hooks
