#include "kernels/cuda/driver.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "kernels/cuda/driver_api.h"
#include "kernels/cuda/kernels.h"

namespace ddp_hooks::cuda {
namespace {

struct Functions {
#define DDP_HOOKS_FUNCTION(name, parameters) DriverStatus(*name) parameters = nullptr;
  DDP_HOOKS_DRIVER_FUNCTIONS(DDP_HOOKS_FUNCTION)
#undef DDP_HOOKS_FUNCTION
};

#define DDP_HOOKS_KERNEL(name, ...) "ddp_hooks_" #name,
constexpr std::array kKernelNames = {DDP_HOOKS_KERNELS(DDP_HOOKS_KERNEL)};
#undef DDP_HOOKS_KERNEL

// The first whose kernels take as many bytes of parameters as the large tables have.
constexpr int kOldestDriver = 12010;
constexpr int kMostDevices = 64;

struct Driver {
  // Not std::once_flag, which needs a later glibc.
  std::mutex mutex;
  std::atomic<bool> looked = false;
  std::string path = "libcuda.so.1";
  Functions call;
  std::array<void*, kKernelNames.size()> kernels{};
  std::string problem;                                      // why there is none, once it was looked for
  std::array<std::atomic<void*>, kMostDevices> contexts{};  // once the device was found to run the kernels
};

// Never destroyed: threads of torch's may still come here when the process ends.
Driver* the_driver = new Driver;

Driver& driver() {
  return *the_driver;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

const char* words_for(DriverStatus status) {
  if (status == kDriverSuccess) return nullptr;
  const char* text = nullptr;
  const bool is_known = driver().call.cuGetErrorString(status, &text) == kDriverSuccess && text != nullptr;
  return is_known ? text : "an error that the driver has no words for";
}

// Says why the driver cannot be used; nothing if it can.
std::string find_driver(Driver& found) {
  if (kernels_image().empty()) {
    return "this build has no CUDA kernels, because nvcc was not found; install the wheel, which has them, or build "
           "ddp_hooks again with DDP_HOOKS_CUDA=1, which says what is missing";
  }
  void* const library = dlopen(found.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    return std::string("CUDA's driver cannot be loaded (") + (why != nullptr ? why : found.path.c_str()) +
           "); install NVIDIA's driver, or train on the CPU";
  }
  const auto is_missing = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function == nullptr;
  };
  int version = 0;
  if (is_missing(found.call.cuDriverGetVersion, "cuDriverGetVersion") ||
      found.call.cuDriverGetVersion(&version) != kDriverSuccess || version < kOldestDriver) {
    return "expected NVIDIA's driver for CUDA " + version_text(kOldestDriver) + " or later, found one for CUDA " +
           version_text(version) + "; update the driver, or train on the CPU";
  }
#define DDP_HOOKS_FUNCTION(name, parameters) \
  if (is_missing(found.call.name, #name)) return "CUDA's driver has no function " #name "; update the driver";
  DDP_HOOKS_DRIVER_FUNCTIONS(DDP_HOOKS_FUNCTION)
#undef DDP_HOOKS_FUNCTION
  const auto refused = [&](const char* what, DriverStatus status) {
    return "the driver for CUDA " + version_text(version) + " cannot " + what + ": " + words_for(status) +
           "; update the driver, or train on the CPU";
  };
  if (const DriverStatus status = found.call.cuInit(0); status != kDriverSuccess) return refused("start", status);
  void* image = nullptr;
  if (const DriverStatus status =
          found.call.cuLibraryLoadData(&image, kernels_image().data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
      status != kDriverSuccess) {
    return refused("load the kernels", status);
  }
  for (size_t i = 0; i < kKernelNames.size(); ++i) {
    const DriverStatus status = found.call.cuLibraryGetKernel(&found.kernels[i], image, kKernelNames[i]);
    if (status != kDriverSuccess) return refused(("find the kernel " + std::string(kKernelNames[i])).c_str(), status);
  }
  return {};
}

}  // namespace

void use_driver(const std::string& path) {
  the_driver = new Driver;
  the_driver->path = path;
}

const char* start_driver() {
  Driver& found = driver();
  if (!found.looked) {
    const std::lock_guard<std::mutex> lock(found.mutex);
    if (!found.looked) found.problem = find_driver(found);
    found.looked = true;
  }
  return found.problem.empty() ? nullptr : found.problem.c_str();
}

const char* enter(int device_index) {
  if (const char* const problem = start_driver(); problem != nullptr) return problem;
  const Functions& call = driver().call;
  if (device_index < 0 || device_index >= kMostDevices) return "expected one of the first 64 GPUs";
  std::atomic<void*>& known = driver().contexts[static_cast<size_t>(device_index)];
  void* current = nullptr;
  if (DriverStatus status = call.cuCtxGetCurrent(&current); status != kDriverSuccess) return words_for(status);
  void* context = known.load();
  if (current != nullptr && context != nullptr) return nullptr;
  if (current == nullptr) {
    if (context == nullptr) {
      int device = 0;
      DriverStatus status = call.cuDeviceGet(&device, device_index);
      // Kept for good: it is the one that torch uses, too.
      if (status == kDriverSuccess) status = call.cuDevicePrimaryCtxRetain(&context, device);
      if (status != kDriverSuccess) return words_for(status);
    }
    if (DriverStatus status = call.cuCtxSetCurrent(context); status != kDriverSuccess) return words_for(status);
  } else {
    context = current;
  }
  // The driver takes the kernels of the fat binary that fit the device only when it is asked for one.
  void* function = nullptr;
  const DriverStatus status = call.cuKernelGetFunction(&function, driver().kernels.front());
  if (status == kDriverSuccess) {
    known.store(context);
    return nullptr;
  }
  thread_local std::string problem;
  problem = "GPU " + std::to_string(device_index) + " cannot run the kernels (" + words_for(status) +
            "), which need compute capability 7.0 or later (7.5 if nvcc of CUDA 13 compiled them); train on the CPU";
  return problem.c_str();
}

const char* launch_blocks(KernelId kernel, int64_t blocks, void** arguments, Stream stream) {
  void* const handle = driver().kernels[static_cast<size_t>(kernel)];
  return words_for(driver().call.cuLaunchKernel(handle, static_cast<unsigned>(blocks), 1, 1, kBlockThreads, 1, 1, 0,
                                                stream, arguments, nullptr));
}

const char* fill_with_zeros(void* on_device, size_t bytes, Stream stream) {
  return words_for(driver().call.cuMemsetD8Async(reinterpret_cast<DeviceAddress>(on_device), 0, bytes, stream));
}

const char* copy_to_host(void* on_host, const void* on_device, size_t bytes, Stream stream) {
  return words_for(driver().call.cuMemcpyAsync(reinterpret_cast<DeviceAddress>(on_host),
                                               reinterpret_cast<DeviceAddress>(on_device), bytes, stream));
}

bool is_capturing(Stream stream) {
  if (start_driver() != nullptr) return false;
  int status = kNotCapturing;
  const DriverStatus error = driver().call.cuStreamIsCapturing(stream, &status);
  if (error == kDriverSuccess) return status != kNotCapturing;
  // The legacy default stream may not be asked while a stream that waits for it is captured.
  return error == kDriverCaptureImplicit;
}

}  // namespace ddp_hooks::cuda
