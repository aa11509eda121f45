#include "kernels/unit_sample.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/cpu/unit_scan.h"
#include "kernels/cuda/widths.h"  // which units are sampled is the same on every device
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

SampledUnits fractions_of(const cuda::SampleCounts& counts) {
  const int64_t others = counts.taken - counts.zeros;
  const int64_t narrow = std::max(counts.narrow[0], counts.narrow[1]);
  return {static_cast<double>(counts.zeros) / static_cast<double>(counts.taken),
          others == 0 ? 0 : static_cast<double>(narrow) / static_cast<double>(others)};
}

// Looks at the first elements of `taken` units.
cuda::SampleCounts count_in(const UnitsOfSlice& units, int64_t taken, int64_t most_elements, ElementType type,
                            bool widths) {
  const int64_t count = count_units(units);
  cuda::SampleCounts counts{taken, 0, {}};
  for (int64_t i = 0; i < taken; ++i) {
    const int64_t begin = i * count / taken * units.unit_length;
    const int64_t length = std::min({units.slice.length - begin, units.unit_length, most_elements});
    const char* const unit = address_of({units.slice.flat, units.slice.offset + begin, length});
    const int64_t looked_at = widths ? std::min(length, cuda::kWidthElements) : length;
    const cpu::UnitFindings found = cpu::scan_unit(unit, looked_at, type, widths);
    const int64_t left = length - looked_at;
    const bool is_nonzero =
        found.any_nonzero || cpu::scan_unit(unit + looked_at * element_bytes(type), left, type).any_nonzero;
    counts.zeros += !is_nonzero;
    for (size_t k = 0; widths && is_nonzero && k < counts.narrow.size(); ++k) {
      counts.narrow[k] += narrow_widths(type)[k] != Width::kFull && !found.inexact[k];
    }
  }
  return counts;
}

SampledUnits sample(const UnitsOfSlice& units, ElementType type, bool widths) {
  const int64_t count = count_units(units);
  const cuda::SampleCounts glance = count_in(units, std::min(kGlancedUnits, count), kGlancedElements, type, widths);
  if (glance.zeros == 0 && glance.narrow[0] == 0 && glance.narrow[1] == 0) return {};
  return fractions_of(count_in(units, cuda::sampled_count(count), units.unit_length, type, widths));
}

}  // namespace

struct PendingUnitSample::OnDevice {
  std::vector<int64_t> units;  // of each slice
  ElementType type;
  bool widths;
  DeviceAnswer answer;
};

PendingUnitSample::PendingUnitSample() = default;
PendingUnitSample::~PendingUnitSample() = default;
PendingUnitSample::PendingUnitSample(PendingUnitSample&&) noexcept = default;
PendingUnitSample& PendingUnitSample::operator=(PendingUnitSample&&) noexcept = default;

const std::vector<SampledUnits>& PendingUnitSample::wait() {
  if (on_device_) {
    auto& [units_of_slices, type, widths, answer] = *on_device_;
    const uint32_t* words = answer.wait();
    for (const int64_t units : units_of_slices) {
      samples_.push_back(fractions_of(cuda::count_sample(words, units, type, widths)));
      words += cuda::words_of_sample(type, widths);
    }
    on_device_.reset();
  }
  return samples_;
}

PendingUnitSample start_unit_sample(const std::vector<UnitsOfSlice>& slices, bool widths) {
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
    const auto words = static_cast<int64_t>(memory.size()) * cuda::words_of_sample(type, widths);
    sample.on_device_.reset(new PendingUnitSample::OnDevice{std::move(units), type, widths, {device, words}});
    DeviceAnswer& answer = sample.on_device_->answer;
    const char* error =
        kernels_of(device).unit_sample(memory.data(), memory.size(), type, widths, answer.device_words(),
                                       answer.host_words(), current_stream_handle(device));
    answer.started_on(stream);
    check_launch(error, device, "sample gradients");
    return sample;
  }
  for (const UnitsOfSlice& units : slices) sample.samples_.push_back(ddp_hooks::sample(units, type, widths));
  return sample;
}

}  // namespace ddp_hooks
