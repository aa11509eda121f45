#include "kernels/nonzero_scan.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <utility>

#include "kernels/cuda/lanes.h"
#include "kernels/device_answer.h"
#include "kernels/devices.h"
#include "kernels/slice_copy.h"

namespace ddp_hooks {
namespace {

void check_alike(const std::vector<SliceOfTensor>& slices) {
  const at::Tensor& first = slices.front().flat;
  check_device(first.device());
  for (const SliceOfTensor& slice : slices) {
    check_range(slice.flat, slice.offset, slice.length);
    TORCH_CHECK(slice.flat.device() == first.device() && slice.flat.scalar_type() == first.scalar_type(),
                "ddp_hooks: expected slices of ", first.scalar_type(), " on ", first.device(), ", received one of ",
                slice.flat.scalar_type(), " on ", slice.flat.device());
  }
}

}  // namespace

struct PendingScan::OnDevice {
  DeviceAnswer answer;
};

PendingScan::PendingScan() = default;
PendingScan::~PendingScan() = default;
PendingScan::PendingScan(PendingScan&&) noexcept = default;
PendingScan& PendingScan::operator=(PendingScan&&) noexcept = default;

const std::vector<ScanResult>& PendingScan::wait() {
  if (on_device_) {
    const uint32_t* flags = on_device_->answer.wait();
    results_.resize(static_cast<size_t>(on_device_->answer.words()));
    for (size_t i = 0; i < results_.size(); ++i) {
      const uint32_t found = flags[i];
      const bool nonzero = (found & cuda::kFoundNonzero) != 0;
      results_[i] = {nonzero, !nonzero && (found & cuda::kFoundNegativeZero) != 0, {}};
    }
    on_device_.reset();
  }
  return results_;
}

PendingScan start_scan(const std::vector<SliceOfTensor>& slices) {
  PendingScan scan;
  if (slices.empty()) return scan;
  check_alike(slices);
  const ElementType type = element_type_of(slices.front().flat);
  const c10::Device device = slices.front().flat.device();
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);
    const c10::Stream stream = current_stream(device);
    std::vector<SliceOfMemory> memory;
    memory.reserve(slices.size());
    for (const SliceOfTensor& slice : slices) {
      check_aligned(slice.flat);
      memory.push_back({address_of(slice), slice.length * slice.flat.element_size()});
    }
    scan.on_device_.reset(new PendingScan::OnDevice{{device, static_cast<int64_t>(slices.size())}});
    DeviceAnswer& answer = scan.on_device_->answer;
    const char* error = kernels_of(device).nonzero_scan(memory.data(), memory.size(), type, answer.device_words(),
                                                        answer.host_words(), current_stream_handle(device));
    answer.started_on(stream);
    check_launch(error, device, "scan gradients");
    return scan;
  }
  scan.results_.reserve(slices.size());
  for (const SliceOfTensor& slice : slices) {
    scan.results_.push_back(cpu::scan_unit(address_of(slice), slice.length, type));
  }
  return scan;
}

}  // namespace ddp_hooks
