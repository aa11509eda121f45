#include "kernels/unit_sample.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "kernels/cpu/unit_scan.h"
#include "kernels/cuda/samples.h"  // which units are sampled is the same on every device
#include "kernels/device_answer.h"
#include "kernels/devices.h"

namespace ddp_hooks {
namespace {

// What a glance looks at: the beginnings of so many units, a cache line each.
constexpr int64_t kGlancedUnits = 8;
constexpr int64_t kGlancedElements = 8;

int64_t count_units(const UnitsOfSlice& units) {
  return (units.slice.length - 1) / units.unit_length + 1;
}

void check_alike(const std::vector<UnitsOfSlice>& slices) {
  const at::Tensor& first = slices.front().slice.flat;
  check_device(first.device());
  for (const auto& [slice, unit_length] : slices) {
    check_range(slice.flat, slice.offset, slice.length);
    TORCH_CHECK(slice.length > 0 && unit_length > 0,
                "ddp_hooks: expected units of at least one element, received units of ", unit_length, " elements in ",
                slice.length);
    TORCH_CHECK(slice.flat.device() == first.device() && slice.flat.scalar_type() == first.scalar_type(),
                "ddp_hooks: expected slices of ", first.scalar_type(), " on ", first.device(), ", received one of ",
                slice.flat.scalar_type(), " on ", slice.flat.device());
  }
}

// How many of `taken` units are zero, by their first elements.
int64_t count_zeros(const UnitsOfSlice& units, int64_t taken, int64_t most_elements, ElementType type) {
  const int64_t count = count_units(units);
  int64_t zeros = 0;
  for (int64_t i = 0; i < taken; ++i) {
    const int64_t begin = i * count / taken * units.unit_length;
    const int64_t length = std::min({units.slice.length - begin, units.unit_length, most_elements});
    zeros += !cpu::holds_nonzero(address_of({units.slice.flat, units.slice.offset + begin, length}), length, type);
  }
  return zeros;
}

double zero_fraction(const UnitsOfSlice& units, ElementType type) {
  const int64_t count = count_units(units), taken = cuda::sampled_count(count);
  if (count_zeros(units, std::min(kGlancedUnits, count), kGlancedElements, type) == 0) return 0;
  return static_cast<double>(count_zeros(units, taken, units.unit_length, type)) / static_cast<double>(taken);
}

}  // namespace

struct PendingUnitSample::OnDevice {
  std::vector<int64_t> units;  // of each slice
  DeviceAnswer answer;
};

PendingUnitSample::PendingUnitSample() = default;
PendingUnitSample::~PendingUnitSample() = default;
PendingUnitSample::PendingUnitSample(PendingUnitSample&&) noexcept = default;
PendingUnitSample& PendingUnitSample::operator=(PendingUnitSample&&) noexcept = default;

const std::vector<double>& PendingUnitSample::wait() {
  if (on_device_) {
    const uint32_t* words = on_device_->answer.wait();
    for (const int64_t units : on_device_->units) {
      zero_fractions_.push_back(static_cast<double>(cuda::count_zeros(words, units)) /
                                static_cast<double>(cuda::sampled_count(units)));
      words += cuda::kWordsPerSample;
    }
    on_device_.reset();
  }
  return zero_fractions_;
}

PendingUnitSample start_unit_sample(const std::vector<UnitsOfSlice>& slices) {
  PendingUnitSample sample;
  if (slices.empty()) return sample;
  check_alike(slices);
  const ElementType type = element_type_of(slices.front().slice.flat);
  const c10::Device device = slices.front().slice.flat.device();
  if (!device.is_cpu()) {
    const c10::DeviceGuard guard(device);
    const c10::Stream stream = current_stream(device);
    std::vector<UnitsOfMemory> memory;
    std::vector<int64_t> units;
    for (const auto& [slice, unit_length] : slices) {
      check_aligned(slice.flat);
      slice.flat.record_stream(stream);
      const int64_t element_size = slice.flat.element_size();
      // A unit may be said to be longer than the slice, in as many bytes as no number counts.
      memory.push_back(
          {address_of(slice), slice.length * element_size, std::min(unit_length, slice.length) * element_size});
      units.push_back(cuda::count_units(memory.back()));
    }
    const auto words = static_cast<int64_t>(memory.size()) * cuda::kWordsPerSample;
    sample.on_device_.reset(new PendingUnitSample::OnDevice{std::move(units), {device, words}});
    DeviceAnswer& answer = sample.on_device_->answer;
    const char* error = kernels_of(device).unit_sample(memory.data(), memory.size(), type, answer.device_words(),
                                                       answer.host_words(), current_stream_handle(device));
    answer.started_on(stream);
    check_launch(error, device, "sample gradients");
    return sample;
  }
  for (const UnitsOfSlice& units : slices) sample.zero_fractions_.push_back(zero_fraction(units, type));
  return sample;
}

}  // namespace ddp_hooks
