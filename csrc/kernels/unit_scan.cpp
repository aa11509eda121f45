#include "kernels/unit_scan.h"

#include <c10/util/Exception.h>

#include <limits>

#include "kernels/devices.h"

namespace ddp_hooks {
namespace {

constexpr int64_t kMostUnits = int64_t{std::numeric_limits<uint32_t>::max()} + 1;

const char* address(const SliceOfTensor& slice) {
  return static_cast<const char*>(slice.flat.const_data_ptr()) + slice.offset * slice.flat.element_size();
}

int64_t count_units(const SliceOfTensor& slice, int64_t unit_length) {
  check_range(slice.flat, slice.offset, slice.length);
  TORCH_CHECK(unit_length > 0, "ddp_hooks: expected units of at least one element, received unit_length ", unit_length);
  const int64_t units = slice.length == 0 ? 0 : (slice.length - 1) / unit_length + 1;
  TORCH_CHECK(units <= kMostUnits, "ddp_hooks: expected at most ", kMostUnits, " units, received ", units);
  return units;
}

}  // namespace

struct PendingUnitScan::OnDevice {};

PendingUnitScan::PendingUnitScan() = default;
PendingUnitScan::~PendingUnitScan() = default;
PendingUnitScan::PendingUnitScan(PendingUnitScan&&) noexcept = default;
PendingUnitScan& PendingUnitScan::operator=(PendingUnitScan&&) noexcept = default;

const UnitScanResult& PendingUnitScan::wait() {
  return result_;
}

PendingUnitScan start_unit_scan(const SliceOfTensor& slice, int64_t unit_length) {
  PendingUnitScan scan;
  const int64_t units = count_units(slice, unit_length);
  check_device(slice.flat.device());
  const ElementType type = element_type_of(slice.flat);
  if (units == 0) return scan;
  TORCH_CHECK(slice.flat.is_cpu(), "ddp_hooks: expected units on the CPU, received a tensor on ", slice.flat.device(),
              "; there is no kernel for that device yet");
  scan.result_ = cpu::unit_scan(address(slice), slice.length, unit_length, type);
  return scan;
}

}  // namespace ddp_hooks
