// A stand-in for CUDA's driver (libcuda.so.1), for rehearsals without a GPU: csrc/testing/rehearsal.h loads it.
//
// It takes memory of the host for the device's, and plays each launch on the CPU when it is made
// (testing/played_kernels.h). Of each kernel, tests/tools/cubins.py tells it what the compiled one says of itself: the
// places and sizes of its parameters, and how many threads it takes. As the driver would, it copies so many bytes from
// each argument to that place and lets the kernel read them there, so a wrong number, order or size of arguments shows.
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/driver_api.h"
#include "testing/played_kernels.h"

using ddp_hooks::cuda::DeviceAddress;
using ddp_hooks::cuda::DriverStatus;
using ddp_hooks::cuda::kDriverNotFound;
using ddp_hooks::cuda::kDriverSuccess;

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace ddp_hooks::cuda {
namespace {

constexpr DriverStatus kInvalidValue = 1;
constexpr DriverStatus kInvalidImage = 200;
constexpr DriverStatus kInvalidContext = 201;
constexpr DriverStatus kLaunchFailed = 719;
constexpr uint32_t kFatBinaryMagic = 0xba55ed50;

struct Parameter {
  uint32_t offset;
  uint32_t bytes;
};

// What a compiled kernel says of itself.
struct Compiled {
  std::string symbol;
  unsigned most_threads;
  std::vector<Parameter> parameters;
};

struct Driver {
  int version = 12010;
  DriverStatus status_of_kernels = kDriverSuccess;
  std::map<std::string, Compiled, std::less<>> compiled;
  std::vector<std::pair<const char*, int64_t>> allowed;
  EmulatedRun run;
  void* stream = nullptr;  // the one that everything has to be put on
  std::string error;
};

Driver the_driver;
thread_local void* context_of_thread = nullptr;

DriverStatus fail(DriverStatus status, std::string why) {
  the_driver.error = std::move(why);
  return status;
}

template <typename Table>
int64_t work_of(const Table& table) {
  return chunk_count(table);
}
template <int kCapacity>
int64_t work_of(const SampleTable<kCapacity>& table) {
  return warp_count(table);
}
template <int kCapacity>
int64_t work_of(const UnitsTable<kCapacity>& table) {
  return warp_count(table);
}
int64_t work_of(const CodedMessage& message) {
  return section_count(message);
}

// The kernels, each as a member with its own parameters.
struct Player : Play {
#define DDP_HOOKS_KERNEL(name, bounds, parameters, ...) \
  void play_##name parameters {                         \
    __VA_ARGS__;                                        \
  }
  DDP_HOOKS_KERNELS(DDP_HOOKS_KERNEL)
#undef DDP_HOOKS_KERNEL
};

// Lets the kernel read its parameters where the compiled one would.
template <typename Table, typename... Rest>
void play(void (Player::*kernel)(Table, Rest...), const Compiled& compiled, const std::vector<char>& bank,
          int64_t warps) {
  std::tuple<std::remove_const_t<Table>, std::remove_const_t<Rest>...> values;
  size_t index = 0;
  const auto read = [&](auto& value) {
    if (index >= compiled.parameters.size()) throw std::logic_error("the compiled kernel has fewer parameters");
    const Parameter& parameter = compiled.parameters[index++];
    if (parameter.bytes != sizeof(value)) throw std::logic_error("the compiled kernel's parameter has another size");
    std::memcpy(static_cast<void*>(&value), bank.data() + parameter.offset, sizeof(value));
  };
  std::apply([&](auto&... each) { (read(each), ...); }, values);
  if (index != compiled.parameters.size()) throw std::logic_error("the compiled kernel has more parameters");
  const int64_t work = work_of(std::get<0>(values));
  if (warps < work) throw std::logic_error("fewer warps than there is work for");
  CheckedMemory memory;
  for (const auto& [begin, bytes] : the_driver.allowed) memory.allow(begin, bytes);
  memory.seal();
  Player player{{warps, memory}};
  std::apply([&](const auto&... each) { (player.*kernel)(each...); }, values);
  the_driver.run.launches += 1;
  the_driver.run.chunks += work;
  the_driver.run.widest_word_bytes = std::max(the_driver.run.widest_word_bytes, memory.widest());
  the_driver.run.sectors_loaded += memory.sectors_loaded();
}

void play_by_name(const Compiled& compiled, const std::vector<char>& bank, int64_t warps) {
#define DDP_HOOKS_KERNEL(name, ...) \
  if (compiled.symbol == "ddp_hooks_" #name) return play(&Player::play_##name, compiled, bank, warps);
  DDP_HOOKS_KERNELS(DDP_HOOKS_KERNEL)
#undef DDP_HOOKS_KERNEL
  throw std::logic_error("nobody knows how to play " + compiled.symbol);
}

DriverStatus launch(const Compiled& compiled, int64_t blocks, unsigned threads, void** arguments) {
  if (context_of_thread == nullptr) return fail(kInvalidContext, "the thread has no context");
  if (threads > compiled.most_threads) return fail(kInvalidValue, "more threads than the kernel was compiled for");
  if (threads != static_cast<unsigned>(kBlockThreads)) return fail(kInvalidValue, "blocks of the wrong size");
  if (blocks < 1 || blocks > INT32_MAX) return fail(kInvalidValue, "a grid of the wrong size");
  size_t bank_bytes = 0;
  for (const Parameter& each : compiled.parameters) bank_bytes = std::max<size_t>(bank_bytes, each.offset + each.bytes);
  std::vector<char> bank(bank_bytes);
  for (size_t i = 0; i < compiled.parameters.size(); ++i) {
    const Parameter& parameter = compiled.parameters[i];
    std::memcpy(bank.data() + parameter.offset, arguments[i], parameter.bytes);
  }
  try {
    play_by_name(compiled, bank, blocks * kWarpsPerBlock);
  } catch (const std::exception& error) {
    return fail(kLaunchFailed, compiled.symbol + ": " + error.what());
  }
  return kDriverSuccess;
}

DriverStatus check_stream(void* stream) {
  if (stream != the_driver.stream) return fail(kInvalidValue, "another stream than the caller's");
  return context_of_thread == nullptr ? fail(kInvalidContext, "the thread has no context") : kDriverSuccess;
}

}  // namespace
}  // namespace ddp_hooks::cuda

using ddp_hooks::cuda::check_stream;
using ddp_hooks::cuda::the_driver;

// What tests tell it and ask it.

EXPORTED void stand_in_forget() {
  the_driver = {};
}

EXPORTED void stand_in_set(int version, DriverStatus status_of_kernels) {
  the_driver.version = version;
  the_driver.status_of_kernels = status_of_kernels;
}

// The offset and the size of each parameter, one pair after the other.
EXPORTED void stand_in_know(const char* name, unsigned most_threads, unsigned count, const uint32_t* places) {
  ddp_hooks::cuda::Compiled& compiled = the_driver.compiled[name];
  compiled = {name, most_threads, {}};
  for (unsigned i = 0; i < count; ++i) compiled.parameters.push_back({places[2 * i], places[2 * i + 1]});
}

EXPORTED void stand_in_begin(void* stream) {
  the_driver.allowed.clear();
  the_driver.run = {};
  the_driver.stream = stream;
}

EXPORTED void stand_in_allow(const void* begin, int64_t bytes) {
  the_driver.allowed.emplace_back(static_cast<const char*>(begin), bytes);
}

EXPORTED void stand_in_run(ddp_hooks::cuda::EmulatedRun* run) {
  *run = the_driver.run;
}

// The driver's own functions.

EXPORTED DriverStatus cuInit(unsigned flags) {
  return flags == 0 ? kDriverSuccess : ddp_hooks::cuda::kInvalidValue;
}

EXPORTED DriverStatus cuDriverGetVersion(int* version) {
  *version = the_driver.version;
  return kDriverSuccess;
}

EXPORTED DriverStatus cuGetErrorString(DriverStatus /*status*/, const char** text) {
  *text = the_driver.error.c_str();
  return kDriverSuccess;
}

EXPORTED DriverStatus cuLibraryLoadData(void** library, const void* image, int* /*jit_options*/, void** /*jit_values*/,
                                        unsigned jit_count, int* /*options*/, void** /*values*/, unsigned count) {
  uint32_t magic = 0;
  std::memcpy(&magic, image, sizeof(magic));
  if (magic != ddp_hooks::cuda::kFatBinaryMagic || jit_count != 0 || count != 0) {
    return ddp_hooks::cuda::fail(ddp_hooks::cuda::kInvalidImage, "device kernel image is invalid");
  }
  *library = const_cast<void*>(image);
  return kDriverSuccess;
}

EXPORTED DriverStatus cuLibraryGetKernel(void** kernel, void* /*library*/, const char* name) {
  const auto found = the_driver.compiled.find(std::string_view(name));
  if (found == the_driver.compiled.end()) return ddp_hooks::cuda::fail(kDriverNotFound, "named symbol not found");
  *kernel = &found->second;
  return kDriverSuccess;
}

EXPORTED DriverStatus cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  if (the_driver.status_of_kernels == kDriverSuccess) return kDriverSuccess;
  return ddp_hooks::cuda::fail(the_driver.status_of_kernels,
                               "no kernel image is available for execution on the device");
}

EXPORTED DriverStatus cuDeviceGet(int* device, int index) {
  *device = index;
  return kDriverSuccess;
}

EXPORTED DriverStatus cuDevicePrimaryCtxRetain(void** context, int /*device*/) {
  *context = &the_driver;
  return kDriverSuccess;
}

EXPORTED DriverStatus cuCtxGetCurrent(void** context) {
  *context = ddp_hooks::cuda::context_of_thread;
  return kDriverSuccess;
}

EXPORTED DriverStatus cuCtxSetCurrent(void* context) {
  ddp_hooks::cuda::context_of_thread = context;
  return kDriverSuccess;
}

EXPORTED DriverStatus cuLaunchKernel(void* kernel, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                                     unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared_bytes,
                                     void* stream, void** arguments, void** extra) {
  if (const DriverStatus status = check_stream(stream); status != kDriverSuccess) return status;
  if (blocks_y != 1 || blocks_z != 1 || threads_y != 1 || threads_z != 1 || shared_bytes != 0 || extra != nullptr) {
    return ddp_hooks::cuda::fail(ddp_hooks::cuda::kInvalidValue, "a launch of the wrong shape");
  }
  return ddp_hooks::cuda::launch(*static_cast<const ddp_hooks::cuda::Compiled*>(kernel), blocks_x, threads_x,
                                 arguments);
}

EXPORTED DriverStatus cuMemsetD8Async(DeviceAddress to, unsigned char value, size_t bytes, void* stream) {
  if (const DriverStatus status = check_stream(stream); status != kDriverSuccess) return status;
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return kDriverSuccess;
}

EXPORTED DriverStatus cuMemcpyAsync(DeviceAddress to, DeviceAddress from, size_t bytes, void* stream) {
  if (const DriverStatus status = check_stream(stream); status != kDriverSuccess) return status;
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return kDriverSuccess;
}

EXPORTED DriverStatus cuStreamIsCapturing(void* /*stream*/, int* status) {
  *status = ddp_hooks::cuda::kNotCapturing;
  return kDriverSuccess;
}
