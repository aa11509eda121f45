#include "kernels/unit_scan.h"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/cuda/units.h"
#include "kernels/device_answer.h"
#include "kernels/devices.h"

namespace ddp_hooks {
namespace {

constexpr int64_t kMostUnits = int64_t{std::numeric_limits<uint32_t>::max()} + 1;

int64_t count_units(const UnitsToScan& scan) {
  const int64_t length = scan.slice.length;
  return length == 0 ? 0 : (length - 1) / scan.unit_length + 1;
}

void check(const UnitsToScan& scan, const at::Tensor& first) {
  const at::Tensor& flat = scan.slice.flat;
  check_range(flat, scan.slice.offset, scan.slice.length);
  TORCH_CHECK(flat.device() == first.device() && flat.scalar_type() == first.scalar_type(),
              "ddp_hooks: expected slices of ", first.scalar_type(), " on ", first.device(), ", received one of ",
              flat.scalar_type(), " on ", flat.device());
  TORCH_CHECK(scan.unit_length > 0, "ddp_hooks: expected units of at least one element, received unit_length ",
              scan.unit_length);
  TORCH_CHECK(count_units(scan) <= kMostUnits, "ddp_hooks: expected at most ", kMostUnits, " units, received ",
              count_units(scan));
  TORCH_CHECK(!scan.candidates || flat.is_cpu(),
              "ddp_hooks: expected candidates of a gradient on the CPU, received one on ", flat.device());
}

UnitScanResult scan_on_cpu(const UnitsToScan& scan, ElementType type) {
  const auto& [slice, unit_length, candidates] = scan;
  if (slice.length == 0) return {};
  if (!candidates) return cpu::unit_scan(address_of(slice), slice.length, unit_length, type);
  RECORD_FUNCTION("ddp_hooks::scan_looked_up", std::vector<c10::IValue>());
  return cpu::unit_scan(address_of(slice), slice.length, unit_length, type, *candidates);
}

}  // namespace

struct PendingUnitScan::OnDevice {
  std::vector<std::pair<size_t, int64_t>> slices;  // that are not empty: index, units
  DeviceAnswer bitmaps;
};

PendingUnitScan::PendingUnitScan() = default;
PendingUnitScan::~PendingUnitScan() = default;
PendingUnitScan::PendingUnitScan(PendingUnitScan&&) noexcept = default;
PendingUnitScan& PendingUnitScan::operator=(PendingUnitScan&&) noexcept = default;

const std::vector<UnitScanResult>& PendingUnitScan::wait() {
  if (on_device_) {
    const uint32_t* bitmaps = on_device_->bitmaps.wait();
    for (const auto& [index, units] : on_device_->slices) {
      results_[index] = cuda::read_bitmaps(bitmaps, units);
      bitmaps += cuda::kBitmaps * cuda::words_of_bitmap(units);
    }
    on_device_.reset();
  }
  return results_;
}

PendingUnitScan start_unit_scan(const std::vector<UnitsToScan>& scans) {
  PendingUnitScan pending;
  if (scans.empty()) return pending;
  const at::Tensor& first = scans.front().slice.flat;
  for (const UnitsToScan& scan : scans) check(scan, first);
  const c10::Device device = first.device();
  check_device(device);
  const ElementType type = element_type_of(first);
  if (device.is_cpu()) {
    for (const UnitsToScan& scan : scans) pending.results_.push_back(scan_on_cpu(scan, type));
    return pending;
  }
  pending.results_.resize(scans.size());
  std::vector<UnitsOfMemory> memory;
  std::vector<std::pair<size_t, int64_t>> slices;
  int64_t words = 0;
  for (size_t i = 0; i < scans.size(); ++i) {
    const SliceOfTensor& slice = scans[i].slice;
    check_aligned(slice.flat);
    if (slice.length == 0) continue;
    // A unit may be said to be longer than the slice, in as many bytes as no number counts.
    const int64_t unit_length = std::min(scans[i].unit_length, slice.length), element_size = slice.flat.element_size();
    memory.push_back({address_of(slice), slice.length * element_size, unit_length * element_size});
    slices.emplace_back(i, memory.back().count());
    words += cuda::kBitmaps * cuda::words_of_bitmap(memory.back().count());
  }
  if (memory.empty()) return pending;
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = current_stream(device);
  pending.on_device_.reset(new PendingUnitScan::OnDevice{std::move(slices), {device, words}});
  DeviceAnswer& answer = pending.on_device_->bitmaps;
  const char* error = kernels_of(device).unit_scan(memory.data(), memory.size(), type, answer.device_words(),
                                                   answer.host_words(), current_stream_handle(device));
  answer.started_on(stream);
  check_launch(error, device, "scan gradients");
  return pending;
}

}  // namespace ddp_hooks
