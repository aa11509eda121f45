#include "kernels/unit_scan.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "kernels/cuda/units.h"
#include "kernels/cuda/widths.h"
#include "kernels/device_answer.h"
#include "kernels/devices.h"

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

struct PendingUnitScan::OnDevice {
  int64_t units;
  ElementType type;
  bool widths;
  DeviceAnswer answer;
};

PendingUnitScan::PendingUnitScan() = default;
PendingUnitScan::~PendingUnitScan() = default;
PendingUnitScan::PendingUnitScan(PendingUnitScan&&) noexcept = default;
PendingUnitScan& PendingUnitScan::operator=(PendingUnitScan&&) noexcept = default;

const UnitScanResult& PendingUnitScan::wait() {
  if (on_device_) {
    auto& [units, type, widths, answer] = *on_device_;
    const uint32_t* bitmaps = answer.wait();
    result_ = widths ? cuda::read_bitmaps_of_widths(bitmaps, units, type) : cuda::read_bitmaps(bitmaps, units);
    on_device_.reset();
  }
  return result_;
}

PendingUnitScan start_unit_scan(const SliceOfTensor& slice, int64_t unit_length, bool widths) {
  PendingUnitScan scan;
  const int64_t units = count_units(slice, unit_length);
  check_device(slice.flat.device());
  const ElementType type = element_type_of(slice.flat);
  if (units == 0) return scan;
  const c10::Device device = slice.flat.device();
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);
    check_aligned(slice.flat);
    const int64_t element_size = slice.flat.element_size();
    const c10::Stream stream = current_stream(device);
    const int64_t words = cuda::bitmap_count(type, widths) * cuda::words_of_bitmap(units);
    scan.on_device_.reset(new PendingUnitScan::OnDevice{units, type, widths, {device, words}});
    DeviceAnswer& answer = scan.on_device_->answer;
    // A unit may be said to be longer than the slice, in as many bytes as no number counts.
    const char* error = kernels_of(device).unit_scan(
        {address_of(slice), slice.length * element_size}, std::min(unit_length, slice.length) * element_size, type,
        widths, answer.device_words(), answer.host_words(), current_stream_handle(device));
    answer.started_on(stream);
    check_launch(error, device, "scan gradients");
    return scan;
  }
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
