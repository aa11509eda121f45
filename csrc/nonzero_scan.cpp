#include "nonzero_scan.h"

#include <c10/util/Exception.h>

#include <utility>

#include "devices.h"
#include "slice_copy.h"

#ifdef DDP_HOOKS_WITH_CUDA
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>

#include "cuda/lanes.h"
#include "cuda/nonzero_scan.h"
#endif

namespace ddp_hooks {
namespace {

char* address(const at::Tensor& flat, const SliceRange& range) {
  return static_cast<char*>(flat.data_ptr()) + range.offset * flat.element_size();
}

}  // namespace

#ifdef DDP_HOOKS_WITH_CUDA

struct PendingScan::OnDevice {
  OnDevice(at::Tensor scanned, int64_t count)
      : flat(std::move(scanned)),
        device_flags(at::empty({count}, flat.options().dtype(at::kInt))),
        host_flags(at::empty({count}, at::TensorOptions().dtype(at::kInt).pinned_memory(true))),
        done(flat.device().type()) {}
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

  at::Tensor flat;
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

PendingScan start_scan(const at::Tensor& flat, const std::vector<SliceRange>& ranges) {
  check_device(flat.device());
  for (const SliceRange& range : ranges) check_range(flat, range.offset, range.length);
  const ElementType type = element_type_of(flat);
  PendingScan scan;
#ifdef DDP_HOOKS_WITH_CUDA
  if (flat.is_cuda()) {
    if (ranges.empty()) return scan;
    check_aligned(flat);
    const c10::DeviceGuard guard(flat.device());
    std::vector<cuda::SliceOfMemory> slices;
    slices.reserve(ranges.size());
    for (const SliceRange& range : ranges) slices.push_back({address(flat, range), range.length * flat.element_size()});
    scan.on_device_ = std::make_unique<PendingScan::OnDevice>(flat, static_cast<int64_t>(ranges.size()));
    PendingScan::OnDevice& pending = *scan.on_device_;
    const c10::impl::VirtualGuardImpl impl(flat.device().type());
    const c10::Stream stream = impl.getStream(flat.device());
    const char* error =
        cuda::nonzero_scan(slices.data(), slices.size(), type, static_cast<uint32_t*>(pending.device_flags.data_ptr()),
                           static_cast<uint32_t*>(pending.host_flags.data_ptr()), current_stream(flat.device()));
    pending.done.record(stream);
    pending.started = true;
    TORCH_CHECK(error == nullptr, "ddp_hooks: CUDA could not scan gradients: ", error);
    return scan;
  }
#endif
  scan.results_.reserve(ranges.size());
  for (const SliceRange& range : ranges) {
    scan.results_.push_back(cpu::nonzero_scan(address(flat, range), range.length, type));
  }
  return scan;
}

ScanResult nonzero_scan(const at::Tensor& flat, int64_t offset, int64_t length) {
  return start_scan(flat, {{offset, length}}).wait().front();
}

}  // namespace ddp_hooks
