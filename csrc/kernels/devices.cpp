#include "kernels/devices.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <array>
#include <optional>

#include "kernels/cuda/coding.h"
#include "kernels/cuda/contribution_sum.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/slice_copy.h"
#include "kernels/cuda/unit_sample.h"
#include "kernels/cuda/unit_scan.h"

namespace ddp_hooks {
namespace {

using Tables = std::array<std::optional<DeviceKernels>, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)>;

Tables& tables() {
  static Tables all = [] {
    Tables known;
    known[static_cast<size_t>(c10::kCUDA)] =
        // From torch 2.15 on there are several, and what a user calls "nccl" calls itself "nccl2" unless
        // TORCH_DIST_USE_NCCL2=0.
        DeviceKernels{.backends = {"nccl", "nccl2", "nccl-lazy"},
                      .gather_scaled = cuda::gather_scaled,
                      .scatter = cuda::scatter,
                      .unit_scan = cuda::unit_scan,
                      .unit_sample = cuda::unit_sample,
                      .sum_terms = cuda::sum_terms,
                      .encode = cuda::encode,
                      .decode = cuda::decode,
                      .enter = [](int index) { return index < 0 ? cuda::start_driver() : cuda::enter(index); },
                      .is_capturing = cuda::is_capturing};
    return known;
  }();
  return all;
}

}  // namespace

const DeviceKernels* find_device_kernels(c10::DeviceType type) {
  const std::optional<DeviceKernels>& kernels = tables()[static_cast<size_t>(type)];
  return kernels ? &*kernels : nullptr;
}

void register_device_kernels(c10::DeviceType type, const DeviceKernels& kernels) {
  TORCH_CHECK(type != c10::kCPU && find_device_kernels(type) == nullptr,
              "ddp_hooks: expected a device type without kernels, received ", type);
  tables()[static_cast<size_t>(type)] = kernels;
}

std::optional<std::string> why_unserved(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  const DeviceKernels* const kernels = find_device_kernels(device.type());
  if (kernels == nullptr) {
    return c10::str("expected gradients on the CPU or on CUDA, received ", device, "; there are no kernels for it");
  }
  const char* const problem = kernels->enter == nullptr ? nullptr : kernels->enter(device.index());
  return problem == nullptr ? std::nullopt : std::make_optional<std::string>(problem);
}

void check_device(c10::Device device) {
  // Of the device itself kernels_of() asks, when it is current.
  const std::optional<std::string> why = why_unserved(c10::Device(device.type()));
  TORCH_CHECK(!why, "ddp_hooks: gradients on ", device, " cannot be served: ", *why);
}

const DeviceKernels& kernels_of(c10::Device device) {
  TORCH_CHECK(!device.is_cpu(), "ddp_hooks: expected a device with kernels, received ", device);
  const std::optional<std::string> why = why_unserved(device);
  TORCH_CHECK(!why, "ddp_hooks: gradients on ", device, " cannot be served: ", *why);
  return *find_device_kernels(device.type());
}

void check_launch(const char* error, c10::Device device, const char* what) {
  TORCH_CHECK(error == nullptr, "ddp_hooks: ", c10::DeviceTypeName(device.type()), " could not ", what, ": ", error);
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

StreamHandle current_stream_handle(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamNativeHandle(current_stream(device));
}

bool is_capturing(c10::Device device) {
  const DeviceKernels* const kernels = find_device_kernels(device.type());
  return kernels != nullptr && kernels->is_capturing(current_stream_handle(device));
}

void refuse_capture(c10::Device device) {
  TORCH_CHECK(
      !is_capturing(device),
      "ddp_hooks: expected a step that runs, received one that is captured into a CUDA graph: the host agrees on what "
      "to send in each step, and a graph would replay one step's answer. Capture without this hook");
}

}  // namespace ddp_hooks
