#include "kernels/nonzero_scan.h"

#include <c10/util/Exception.h>

#include <utility>

#include "kernels/devices.h"
#include "kernels/slice_copy.h"

#ifdef DDP_HOOKS_WITH_CUDA
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>

#include "kernels/cuda/lanes.h"
#include "kernels/cuda/nonzero_scan.h"
#endif

namespace ddp_hooks {
namespace {

char* address(const SliceOfTensor& slice) {
  return static_cast<char*>(slice.flat.data_ptr()) + slice.offset * slice.flat.element_size();
}

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

#ifdef DDP_HOOKS_WITH_CUDA

struct PendingScan::OnDevice {
  explicit OnDevice(const std::vector<SliceOfTensor>& scanned)
      : slices(scanned),
        device_flags(at::empty({count()}, slices.front().flat.options().dtype(at::kInt))),
        host_flags(at::empty({count()}, at::TensorOptions().dtype(at::kInt).pinned_memory(true))),
        done(device_flags.device().type()) {}
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  // The device may still write to host_flags when nobody has waited, because the pass failed, say. Memory that is given
  // back too early would be somebody else's by then.
  ~OnDevice() {
    if (!started) return;
    try {
      done.synchronize();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the device is lost, and with it whatever it would have written
    }
  }

  int64_t count() const { return static_cast<int64_t>(slices.size()); }

  const std::vector<SliceOfTensor> slices;
  at::Tensor device_flags;
  at::Tensor host_flags;
  c10::Event done;
  bool started = false;
};

#else

struct PendingScan::OnDevice {};

#endif

PendingScan::PendingScan() = default;
PendingScan::~PendingScan() = default;
PendingScan::PendingScan(PendingScan&&) noexcept = default;
PendingScan& PendingScan::operator=(PendingScan&&) noexcept = default;

const std::vector<ScanResult>& PendingScan::wait() {
#ifdef DDP_HOOKS_WITH_CUDA
  if (on_device_) {
    on_device_->done.synchronize();
    on_device_->started = false;
    const auto* flags = static_cast<const int32_t*>(on_device_->host_flags.const_data_ptr());
    results_.resize(static_cast<size_t>(on_device_->host_flags.numel()));
    for (size_t i = 0; i < results_.size(); ++i) {
      const auto found = static_cast<uint32_t>(flags[i]);
      const bool nonzero = (found & cuda::kFoundNonzero) != 0;
      results_[i] = {nonzero, !nonzero && (found & cuda::kFoundNegativeZero) != 0};
    }
    on_device_.reset();
  }
#endif
  return results_;
}

PendingScan start_scan(const std::vector<SliceOfTensor>& slices) {
  PendingScan scan;
  if (slices.empty()) return scan;
  check_alike(slices);
  const ElementType type = element_type_of(slices.front().flat);
#ifdef DDP_HOOKS_WITH_CUDA
  const c10::Device device = slices.front().flat.device();
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    std::vector<cuda::SliceOfMemory> memory;
    memory.reserve(slices.size());
    for (const SliceOfTensor& slice : slices) {
      check_aligned(slice.flat);
      memory.push_back({address(slice), slice.length * slice.flat.element_size()});
    }
    scan.on_device_ = std::make_unique<PendingScan::OnDevice>(slices);
    PendingScan::OnDevice& pending = *scan.on_device_;
    const char* error =
        cuda::nonzero_scan(memory.data(), memory.size(), type, static_cast<uint32_t*>(pending.device_flags.data_ptr()),
                           static_cast<uint32_t*>(pending.host_flags.data_ptr()), current_stream_handle(device));
    pending.done.record(current_stream(device));
    pending.started = true;
    TORCH_CHECK(error == nullptr, "ddp_hooks: CUDA could not scan gradients: ", error);
    return scan;
  }
#endif
  scan.results_.reserve(slices.size());
  for (const SliceOfTensor& slice : slices) {
    scan.results_.push_back(cpu::nonzero_scan(address(slice), slice.length, type));
  }
  return scan;
}

}  // namespace ddp_hooks
