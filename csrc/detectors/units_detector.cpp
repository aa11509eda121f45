#include "detectors/units_detector.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "agreement/mask_codec.h"

namespace ddp_hooks {
namespace {

// Less than this part of the units is not worth an exchange, whatever the policy asks for.
constexpr double kLeastZeros = 1.0 / 8;

}  // namespace

void UnitsDetector::use_layout(const LayoutOfBuckets& layout) {
  needed_.assign(layout.buckets.size(), {});
  std::vector<size_t> parameters;
  UsageMask on_device(layout.parameter_count);
  if (settings_.detector != ValuesDetector::kOff) {
    for (const BucketLayout& bucket : layout.buckets) {
      for (const ParameterSlice& slice : bucket.slices) {
        if (bucket.sparse || units_of(slice, bucket).count() <= 1) continue;
        parameters.push_back(slice.parameter);
        if (!bucket.is_on_cpu()) on_device.set(slice.parameter);
      }
    }
  }
  std::sort(parameters.begin(), parameters.end());
  // New buckets hold the same parameters as the old ones; what is known of them stays.
  const auto same = [](const Divided& divided, size_t parameter) { return divided.parameter == parameter; };
  if (std::equal(divided_.begin(), divided_.end(), parameters.begin(), parameters.end(), same)) return;
  divided_.clear();
  samples_.clear();
  for (size_t parameter : parameters) {
    divided_.push_back({parameter, on_device.test(parameter), false, false, settings_.probe.first_pause_steps, 0});
  }
  // Until this rank has seen a gradient.
  objections_ = UsageMask(divided_.size(), true);
}

Units UnitsDetector::units_of(const ParameterSlice& slice, const BucketLayout& bucket) const {
  return ddp_hooks::units_of(slice, bucket.element_bytes, settings_.units);
}

UnitsDetector::Divided* UnitsDetector::find(size_t parameter) {
  const auto found = std::lower_bound(divided_.begin(), divided_.end(), parameter,
                                      [](const Divided& divided, size_t wanted) { return divided.parameter < wanted; });
  return found != divided_.end() && found->parameter == parameter ? &*found : nullptr;
}

double UnitsDetector::least_zero_fraction() const {
  return std::max(kLeastZeros, settings_.probe.min_zero_fraction);
}

UsageMask UnitsDetector::objections(bool none) {
  if (!is_adaptive()) return {};
  if (none) return UsageMask(divided_.size());
  const double least = least_zero_fraction();
  for (auto& [objectors, sample] : samples_) {
    const std::vector<SampledUnits>& fractions = sample.wait();
    for (size_t i = 0; i < objectors.size(); ++i) {
      if (fractions[i].zero_fraction >= least) objections_.clear(objectors[i]);
    }
  }
  samples_.clear();
  return objections_;
}

bool UnitsDetector::may_choose() const {
  // What is chosen for the first time has to be looked through once.
  return std::any_of(divided_.begin(), divided_.end(),
                     [&](const Divided& divided) { return divided.pays || !is_adaptive(); });
}

UsageMask UnitsDetector::choose(const UsageMask& used, const UsageMask& objections, int64_t step) {
  UsageMask chosen(used.size());
  for (size_t i = 0; i < divided_.size(); ++i) {
    Divided& divided = divided_[i];
    if (!used.test(divided.parameter)) continue;
    const bool is_due = step >= divided.next_step;
    if (!is_adaptive() || divided.pays || (is_due && !objections.test(i))) {
      chosen.set(divided.parameter);
      divided.looked_at = false;
    } else if (divided.on_device) {
      if (is_due && divided.looked_at) leave_alone(divided, step);
      // It travels whole in this step, so that every rank looks at it, if it is due in the next one.
      divided.looked_at = step + 1 >= divided.next_step;
    }
  }
  return chosen;
}

bool UnitsDetector::is_due(size_t parameter, int64_t next) {
  const Divided* divided = is_adaptive() ? find(parameter) : nullptr;
  return divided != nullptr && next >= divided->next_step;
}

void UnitsDetector::look(const BucketLayout& bucket, const at::Tensor& flat, const BucketViews& views,
                         const UsageMask& whole, int64_t next) {
  std::vector<size_t> objectors;
  std::vector<UnitsOfSlice> gradients;
  for (const ParameterSlice& slice : bucket.slices) {
    if (!whole.test(slice.parameter) || !is_due(slice.parameter, next)) continue;
    const auto index = static_cast<size_t>(find(slice.parameter) - divided_.data());
    if (!views.has_gradient(slice.parameter)) {
      objections_.clear(index);  // nothing is as good as zeros
      continue;
    }
    SliceOfTensor gradient{flat, slice.offset, slice.length};
    if (views.is_detached(slice.parameter)) {
      gradient = {views.find(slice.parameter), 0, slice.length};
      if (!gradient.flat.defined()) continue;
    }
    objections_.set(index);
    objectors.push_back(index);
    gradients.push_back({std::move(gradient), units_of(slice, bucket).length});
  }
  if (objectors.empty()) return;
  RECORD_FUNCTION("ddp_hooks::sample", std::vector<c10::IValue>());
  samples_.emplace_back(std::move(objectors), start_unit_sample(gradients));
}

bool UnitsDetector::observe(size_t parameter, int64_t step, int64_t elements, int64_t sent_elements) {
  Divided* divided = find(parameter);
  if (divided == nullptr) return false;
  const int64_t zeros = elements - sent_elements;
  divided->pays =
      zeros > 0 && static_cast<double>(zeros) >= settings_.probe.min_zero_fraction * static_cast<double>(elements);
  if (divided->pays) {
    divided->pause = settings_.probe.first_pause_steps;
  } else {
    leave_alone(*divided, step);
  }
  return divided->pays;
}

void UnitsDetector::leave_alone(Divided& divided, int64_t step) const {
  divided.next_step = saturating_sum(step + 1, divided.pause);
  divided.pause = std::min(saturating_sum(divided.pause, divided.pause), settings_.probe.longest_pause_steps);
}

size_t UnitsDetector::capacity_words(uint32_t bucket, const std::vector<size_t>& parameters, size_t bits) const {
  const Needed& before = needed_[bucket];
  if (before.parameters != parameters) return most_words(bits);
  // A quarter more, so that what varies from step to step seldom needs a second exchange.
  constexpr size_t kSpareWords = 8;
  return std::min(before.words + before.words / 4 + kSpareWords, most_words(bits));
}

void UnitsDetector::note_needed_words(uint32_t bucket, const std::vector<size_t>& parameters, size_t needed) {
  needed_[bucket] = {parameters, needed};
}

}  // namespace ddp_hooks
