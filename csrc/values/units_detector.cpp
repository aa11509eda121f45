#include "values/units_detector.h"

#include <algorithm>

#include "agreement/mask_codec.h"

namespace ddp_hooks {
namespace {

// A gradient is looked at in so many of its units.
constexpr int64_t kSampledUnits = 64;
// Dense ones are told apart at a glance: by the beginnings of so many, which cost a cache line each.
constexpr int64_t kGlancedUnits = 8;
constexpr int64_t kGlancedElements = 8;
// Less than this part of the units is not worth an exchange, whatever the policy asks for.
constexpr double kLeastZeros = 1.0 / 8;

std::vector<SliceOfTensor> sample_of(const SliceOfTensor& gradient, const Units& units, int64_t count,
                                     int64_t most_elements) {
  std::vector<SliceOfTensor> sample;
  const int64_t taken = std::min(count, units.count());
  for (int64_t i = 0; i < taken; ++i) {
    const int64_t unit = i * units.count() / taken;
    const int64_t length = std::min(units.end(unit) - units.begin(unit), most_elements);
    sample.push_back({gradient.flat, gradient.offset + units.begin(unit), length});
  }
  return sample;
}

double zero_fraction(const std::vector<ScanResult>& results) {
  const auto zeros = std::count_if(results.begin(), results.end(), [](const ScanResult& r) { return !r.any_nonzero; });
  return static_cast<double>(zeros) / static_cast<double>(std::max<size_t>(results.size(), 1));
}

}  // namespace

void UnitsDetector::use_layout(const LayoutOfBuckets& layout) {
  needed_.assign(layout.buckets.size(), {});
  std::vector<size_t> parameters;
  if (settings_.detector != ValuesDetector::kOff) {
    for (const BucketLayout& bucket : layout.buckets) {
      for (const ParameterSlice& slice : bucket.slices) {
        if (!bucket.sparse && units_of(slice, bucket).count() > 1) parameters.push_back(slice.parameter);
      }
    }
  }
  std::sort(parameters.begin(), parameters.end());
  // New buckets hold the same parameters as the old ones; what is known of them stays.
  const auto same = [](const Divided& divided, size_t parameter) { return divided.parameter == parameter; };
  if (std::equal(divided_.begin(), divided_.end(), parameters.begin(), parameters.end(), same)) return;
  divided_.clear();
  samples_.clear();
  for (size_t parameter : parameters) divided_.push_back({parameter, false, settings_.probe.first_pause_steps, 0});
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

UsageMask UnitsDetector::objections(bool none) {
  if (!is_adaptive()) return {};
  if (none) return UsageMask(divided_.size());
  const double least = std::max(kLeastZeros, settings_.probe.min_zero_fraction);
  for (auto& [index, sample] : samples_) {
    if (zero_fraction(sample.wait()) >= least) objections_.clear(index);
  }
  samples_.clear();
  return objections_;
}

bool UnitsDetector::may_choose() const {
  // What is chosen for the first time has to be looked through once.
  return std::any_of(divided_.begin(), divided_.end(),
                     [&](const Divided& divided) { return divided.pays || !is_adaptive(); });
}

UsageMask UnitsDetector::choose(const UsageMask& used, const UsageMask& objections, int64_t step) const {
  UsageMask chosen(used.size());
  for (size_t i = 0; i < divided_.size(); ++i) {
    const Divided& divided = divided_[i];
    if (!used.test(divided.parameter)) continue;
    const bool wanted = !is_adaptive() || divided.pays || (step >= divided.next_step && !objections.test(i));
    if (wanted) chosen.set(divided.parameter);
  }
  return chosen;
}

void UnitsDetector::look(const BucketLayout& bucket, const at::Tensor& flat, const BucketSlots& slots,
                         const UsageMask& whole, int64_t next) {
  if (!is_adaptive()) return;
  for (const ParameterSlice& slice : bucket.slices) {
    const Divided* divided = whole.test(slice.parameter) ? find(slice.parameter) : nullptr;
    if (divided == nullptr || next < divided->next_step) continue;
    const auto index = static_cast<size_t>(divided - divided_.data());
    if (!slots.has_gradient(slice.parameter)) {
      objections_.clear(index);  // nothing is as good as zeros
    } else if (!slots.is_vacant(slice.parameter)) {
      sample(index, {flat, slice.offset, slice.length}, units_of(slice, bucket));
    } else if (const at::Tensor gradient = slots.find(slice.parameter); gradient.defined()) {
      sample(index, {gradient, 0, slice.length}, units_of(slice, bucket));
    }
  }
}

void UnitsDetector::sample(size_t index, const SliceOfTensor& gradient, const Units& units) {
  objections_.set(index);
  if (gradient.flat.is_cpu()) {
    PendingScan glance = start_scan(sample_of(gradient, units, kGlancedUnits, kGlancedElements));
    if (zero_fraction(glance.wait()) == 0) return;
  }
  samples_.emplace_back(index, start_scan(sample_of(gradient, units, kSampledUnits, units.length)));
}

void UnitsDetector::observe(size_t parameter, int64_t step, int64_t elements, int64_t sent_elements) {
  Divided* divided = find(parameter);
  if (divided == nullptr) return;
  const int64_t zeros = elements - sent_elements;
  divided->pays =
      zeros > 0 && static_cast<double>(zeros) >= settings_.probe.min_zero_fraction * static_cast<double>(elements);
  if (divided->pays) {
    divided->pause = settings_.probe.first_pause_steps;
    return;
  }
  divided->next_step = saturating_sum(step + 1, divided->pause);
  divided->pause = std::min(saturating_sum(divided->pause, divided->pause), settings_.probe.longest_pause_steps);
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
