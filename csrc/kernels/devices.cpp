#include "kernels/devices.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#ifdef DDP_HOOKS_WITH_CUDA
#include "kernels/cuda/stream.h"
#endif

namespace ddp_hooks {

bool has_cuda() {
#ifdef DDP_HOOKS_WITH_CUDA
  return true;
#else
  return false;
#endif
}

void check_device(c10::Device device) {
  if (device.is_cpu()) return;
  if (has_cuda()) {
    TORCH_CHECK(device.is_cuda(), "ddp_hooks: expected gradients on the CPU or on CUDA, received ", device,
                "; there are no kernels for that device");
    return;
  }
  TORCH_CHECK(
      !device.is_cuda(), "ddp_hooks: expected gradients on the CPU, received ", device,
      "; this build has no CUDA path: build ddp_hooks again with DDP_HOOKS_CUDA=1, which needs a torch with CUDA "
      "and its nvcc and says if either is missing");
  TORCH_CHECK(false, "ddp_hooks: expected gradients on the CPU, received ", device,
              "; this build has no path for that device");
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void* current_stream_handle(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamNativeHandle(current_stream(device));
}

bool is_capturing([[maybe_unused]] c10::Device device) {
#ifdef DDP_HOOKS_WITH_CUDA
  if (device.is_cuda()) return cuda::is_capturing(current_stream_handle(device));
#endif
  return false;
}

}  // namespace ddp_hooks
