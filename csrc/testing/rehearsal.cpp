#include "testing/rehearsal.h"

#include <dlfcn.h>

#include <optional>
#include <stdexcept>

#include "kernels/cuda/coding.h"
#include "kernels/cuda/driver.h"
#include "kernels/device_kernels.h"

namespace ddp_hooks::cuda {
namespace {

// The side of the stand-in that the driver does not have.
struct StandIn {
  explicit StandIn(const std::string& path) : library(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (library == nullptr) throw std::runtime_error(dlerror());
    find(begin, "stand_in_begin");
    find(allow, "stand_in_allow");
    find(run, "stand_in_run");
  }

  template <typename Function>
  void find(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(std::string("the stand-in has no ") + name);
  }

  void* library;
  void (*begin)(void* stream) = nullptr;
  void (*allow)(const void* begin, int64_t bytes) = nullptr;
  void (*run)(EmulatedRun* run) = nullptr;
};

std::optional<StandIn> stand_in;
// Not null, so that nothing takes the default stream instead.
void* const kStream = reinterpret_cast<void*>(uintptr_t{64});

template <typename Slices>
void watch(const Slices& slices) {
  stand_in->begin(kStream);
  for (const auto& slice : slices) stand_in->allow(slice.address, slice.bytes);
}

const DeviceKernels& kernels() {
  const DeviceKernels& cuda = *find_device_kernels(c10::kCUDA);
  if (const char* const problem = cuda.enter(0); problem != nullptr) throw std::runtime_error(problem);
  return cuda;
}

EmulatedRun finish(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
  EmulatedRun run;
  stand_in->run(&run);
  return run;
}

int64_t total_bytes(const std::vector<SliceOfMemory>& slices) {
  int64_t total = 0;
  for (const SliceOfMemory& slice : slices) total += slice.bytes;
  return total;
}

EmulatedRun rehearse_gather_scaled(char* message, const std::vector<SliceOfMemory>& slices, ElementType type,
                                   double factor) {
  watch(slices);
  stand_in->allow(message, total_bytes(slices));
  return finish(kernels().gather_scaled(message, slices.data(), slices.size(), type, factor, kStream));
}

EmulatedRun rehearse_scatter(char* message, const std::vector<SliceOfMemory>& slices) {
  watch(slices);
  stand_in->allow(message, total_bytes(slices));
  return finish(kernels().scatter(message, slices.data(), slices.size(), kStream));
}

// Answers are filled with what nobody would mistake for one first. Behind them is a word that nobody may touch.
template <typename Start>
EmulatedRun with_answer(size_t words, std::vector<uint32_t>& answer, const Start& start) {
  constexpr uint32_t kUntouched = 0xdeadbeef;
  std::vector<uint32_t> on_device(words + 1, kUntouched);
  answer.assign(words + 1, kUntouched);
  const EmulatedRun run = finish(start(on_device.data(), answer.data()));
  if (on_device.back() != kUntouched || answer.back() != kUntouched) throw std::logic_error("a word past the answer");
  answer.pop_back();
  return run;
}

EmulatedRun rehearse_unit_scan(const std::vector<UnitsOfMemory>& slices, ElementType type,
                               std::vector<uint32_t>& bitmaps) {
  watch(slices);
  size_t words = 0;
  for (const UnitsOfMemory& slice : slices) {
    words += static_cast<size_t>(kBitmaps * words_of_bitmap(slice.count()));
  }
  return with_answer(words, bitmaps, [&](uint32_t* on_device, uint32_t* on_host) {
    return kernels().unit_scan(slices.data(), slices.size(), type, on_device, on_host, kStream);
  });
}

EmulatedRun rehearse_unit_sample(const std::vector<UnitsOfMemory>& slices, ElementType type,
                                 std::vector<uint32_t>& words) {
  watch(slices);
  const size_t count = slices.size() * static_cast<size_t>(kWordsPerSample);
  return with_answer(count, words, [&](uint32_t* on_device, uint32_t* on_host) {
    return kernels().unit_sample(slices.data(), slices.size(), type, on_device, on_host, kStream);
  });
}

EmulatedRun rehearse_sum_terms(const char* packed, int64_t packed_bytes, const std::vector<SliceToSum>& slices,
                               ElementType type, double factor, bool adds_zero) {
  watch(slices);
  stand_in->allow(packed, packed_bytes);
  return finish(kernels().sum_terms(packed, slices.data(), slices.size(), type, factor, adds_zero, kStream));
}

EmulatedRun rehearse_encode(const char* values, int64_t count, ElementType type, char* to, int64_t most_bytes,
                            int64_t& bytes) {
  watch(std::vector<SliceOfMemory>{});
  stand_in->allow(values, count * element_bytes(type));
  stand_in->allow(to, most_bytes);
  std::vector<uint32_t> words;
  const EmulatedRun run = with_answer(kWordsOfSize, words, [&](uint32_t* on_device, uint32_t* on_host) {
    return kernels().encode(values, count, type, to, on_device, on_host, kStream);
  });
  bytes = static_cast<int64_t>(words[0] | uint64_t{words[1]} << 32);
  return run;
}

EmulatedRun rehearse_decode(const char* coded, int64_t bytes, int64_t count, ElementType type, char* to, bool adds,
                            uint32_t& wrong) {
  watch(std::vector<SliceOfMemory>{});
  stand_in->allow(coded, bytes);
  stand_in->allow(to, count * element_bytes(type));
  std::vector<uint32_t> words;
  const EmulatedRun run = with_answer(1, words, [&](uint32_t* on_device, uint32_t* on_host) {
    return kernels().decode(coded, bytes, count, type, to, adds, on_device, on_host, kStream);
  });
  wrong = words[0];
  return run;
}

constexpr Emulation kRehearsal = {rehearse_gather_scaled, rehearse_scatter, rehearse_unit_scan, rehearse_unit_sample,
                                  rehearse_sum_terms,     rehearse_encode,  rehearse_decode};

}  // namespace

const Emulation& emulation() {
  static constexpr Emulation kEmulation;
  return stand_in ? kRehearsal : kEmulation;
}

void rehearse(const std::string& path) {
  stand_in.reset();
  if (path.empty()) return;
  stand_in.emplace(path);
  use_driver(path);
}

}  // namespace ddp_hooks::cuda
