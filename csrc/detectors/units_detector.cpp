#include "detectors/units_detector.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "agreement/mask_codec.h"

namespace ddp_hooks {
namespace {

// Less than this part of the units is not worth an exchange, whatever the policy asks for.
constexpr double kLeastZeros = 1.0 / 8;
// As long as it pays, and no longer.
constexpr int64_t kLooksAfterPay = 1;

}  // namespace

void UnitsDetector::use_layout(const LayoutOfBuckets& layout) {
  needed_.assign(layout.buckets.size(), {});
  std::vector<Divided> divided;
  if (settings_.skip_zero_rows != When::kOff) {
    for (const BucketLayout& bucket : layout.buckets) {
      for (const ParameterSlice& slice : bucket.slices) {
        if (bucket.sparse || units_of(slice, bucket).count() <= 1) continue;
        divided.push_back(
            {slice.parameter, !bucket.is_on_cpu(), {settings_.adaptive, kLooksAfterPay, false}, false, false});
      }
    }
  }
  std::sort(divided.begin(), divided.end(),
            [](const Divided& a, const Divided& b) { return a.parameter < b.parameter; });
  // New buckets hold the same parameters as the old ones; what is known of them stays.
  const auto same = [](const Divided& a, const Divided& b) { return a.parameter == b.parameter; };
  if (std::equal(divided_.begin(), divided_.end(), divided.begin(), divided.end(), same)) return;
  divided_ = std::move(divided);
  samples_.clear();
  // Until this rank has seen a gradient.
  objections_ = UsageMask(is_adaptive() ? divided_.size() : 0, true);
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
  return std::max(kLeastZeros, settings_.adaptive.min_zero_fraction);
}

UsageMask UnitsDetector::objections(bool none) {
  if (none) return UsageMask(objections_.size());
  for (Sample& sample : samples_) {
    const std::vector<double>& zero_fractions = sample.units.wait();
    for (size_t i = 0; i < zero_fractions.size(); ++i) {
      if (zero_fractions[i] >= least_zero_fraction()) objections_.clear(sample.divided[i]);
    }
  }
  samples_.clear();
  return objections_;
}

bool UnitsDetector::may_choose() const {
  // What is chosen for the first time has to be looked through once.
  return settings_.skip_zero_rows == When::kOn
             ? !divided_.empty()
             : std::any_of(divided_.begin(), divided_.end(),
                           [](const Divided& divided) { return divided.rule.is_on(); });
}

// On a device what may be asked in the next step has been looked at by every rank then, because its parameter travels
// whole in this one.
bool UnitsDetector::ask(Divided& divided, bool objected, int64_t step) const {
  const bool is_due = divided.rule.is_due(step);
  divided.asked = settings_.skip_zero_rows == When::kOn || divided.rule.is_on() || (is_due && !objected);
  if (divided.asked) {
    divided.looked_at = false;
  } else if (divided.on_device) {
    if (is_due && divided.looked_at) divided.rule.pause(step);
    divided.looked_at = divided.rule.is_due(step + 1);
  }
  return divided.asked;
}

ChosenUnits UnitsDetector::choose(const UsageMask& used, const UsageMask& objections, int64_t step) {
  ChosenUnits chosen{UsageMask(used.size())};
  for (size_t i = 0; i < divided_.size(); ++i) {
    Divided& divided = divided_[i];
    if (!used.test(divided.parameter)) continue;
    if (ask(divided, is_adaptive() && objections.test(i), step)) chosen.divided.set(divided.parameter);
  }
  return chosen;
}

bool UnitsDetector::is_due(size_t parameter, int64_t next) {
  const Divided* divided = is_adaptive() ? find(parameter) : nullptr;
  return divided != nullptr && divided->rule.is_due(next);
}

void UnitsDetector::look(const BucketLayout& bucket, const at::Tensor& flat, const BucketViews& views,
                         const UsageMask& whole, int64_t next) {
  Sample sample;
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
      gradient = {views.find_to_read(slice.parameter), 0, slice.length};
      if (!gradient.flat.defined()) continue;
    }
    objections_.set(index);
    sample.divided.push_back(index);
    gradients.push_back({std::move(gradient), units_of(slice, bucket).length});
  }
  if (gradients.empty()) return;
  RECORD_FUNCTION("ddp_hooks::sample", std::vector<c10::IValue>());
  sample.units = start_unit_sample(gradients);
  samples_.push_back(std::move(sample));
}

bool UnitsDetector::observe(size_t parameter, int64_t step, int64_t elements, double sent) {
  Divided* divided = find(parameter);
  if (divided == nullptr || !divided->asked) return false;
  return divided->rule.observe(step, static_cast<double>(elements) - sent, static_cast<double>(elements));
}

size_t UnitsDetector::capacity_words(uint32_t bucket, const std::vector<size_t>& parameters, size_t bits) const {
  const Needed& before = needed_[bucket];
  if (before.parameters != parameters || before.bits != bits) return most_words(bits);
  // A quarter more, so that what varies from step to step seldom needs a second exchange.
  constexpr size_t kSpareWords = 8;
  return std::min(before.words + before.words / 4 + kSpareWords, most_words(bits));
}

void UnitsDetector::note_needed_words(uint32_t bucket, const std::vector<size_t>& parameters, size_t bits,
                                      size_t needed) {
  needed_[bucket] = {parameters, bits, needed};
}

}  // namespace ddp_hooks
