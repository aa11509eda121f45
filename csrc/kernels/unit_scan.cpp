#include "kernels/unit_scan.h"

#include <c10/util/Exception.h>

#include <limits>

#include "kernels/devices.h"

#ifdef DDP_HOOKS_WITH_CUDA
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>

#include <algorithm>

#include "kernels/cuda/unit_scan.h"
#include "kernels/cuda/units.h"
#endif

namespace ddp_hooks {
namespace {

constexpr int64_t kMostUnits = int64_t{std::numeric_limits<uint32_t>::max()} + 1;

char* address(const SliceOfTensor& slice) {
  return static_cast<char*>(slice.flat.data_ptr()) + slice.offset * slice.flat.element_size();
}

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
  OnDevice(const SliceOfTensor& scanned, int64_t units_of_slice)
      : slice(scanned),
        units(units_of_slice),
        device_bitmaps(at::empty({2 * cuda::words_of_bitmap(units)}, slice.flat.options().dtype(at::kInt))),
        host_bitmaps(at::empty(device_bitmaps.sizes(), at::TensorOptions().dtype(at::kInt).pinned_memory(true))),
        done(device_bitmaps.device().type()) {}
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  // The device may still write to host_bitmaps when nobody has waited, because the pass failed, say. Memory that is
  // given back too early would be somebody else's by then.
  ~OnDevice() {
    if (!started) return;
    try {
      done.synchronize();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the device is lost, and with it whatever it would have written
    }
  }

  const SliceOfTensor slice;
  const int64_t units;
  at::Tensor device_bitmaps;
  at::Tensor host_bitmaps;
  c10::Event done;
  bool started = false;
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
    on_device_->done.synchronize();
    on_device_->started = false;
    result_ =
        cuda::read_bitmaps(static_cast<const uint32_t*>(on_device_->host_bitmaps.const_data_ptr()), on_device_->units);
    on_device_.reset();
  }
#endif
  return result_;
}

PendingUnitScan start_unit_scan(const SliceOfTensor& slice, int64_t unit_length) {
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
    scan.on_device_ = std::make_unique<PendingUnitScan::OnDevice>(slice, units);
    PendingUnitScan::OnDevice& pending = *scan.on_device_;
    // A unit may be said to be longer than the slice, in as many bytes as no number counts.
    const char* error = cuda::unit_scan(
        {address(slice), slice.length * element_size}, std::min(unit_length, slice.length) * element_size, type,
        static_cast<uint32_t*>(pending.device_bitmaps.data_ptr()),
        static_cast<uint32_t*>(pending.host_bitmaps.data_ptr()), current_stream_handle(device));
    pending.done.record(current_stream(device));
    pending.started = true;
    TORCH_CHECK(error == nullptr, "ddp_hooks: CUDA could not scan gradients: ", error);
    return scan;
  }
#endif
  scan.result_ = cpu::unit_scan(address(slice), slice.length, unit_length, type);
  return scan;
}

}  // namespace ddp_hooks
