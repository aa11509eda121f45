#include "detectors/units_detector.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "agreement/mask_codec.h"

namespace ddp_hooks {
namespace {

// Less than this part of the units is not worth an exchange, whatever the policy asks for.
constexpr double kLeastZeros = 1.0 / 8;
// A narrow unit saves half of its bytes on two ranks, and a quarter where its owner sends back a full sum.
constexpr double kLeastNarrow = 1.0 / 4;
// As long as it pays, and no longer.
constexpr int64_t kLooksAfterPay = 1;

}  // namespace

void UnitsDetector::use_layout(const LayoutOfBuckets& layout) {
  needed_.assign(layout.buckets.size(), {});
  std::vector<Divided> divided;
  if (settings_.skip_zero_rows != When::kOff || settings_.narrow != When::kOff) {
    for (const BucketLayout& bucket : layout.buckets) {
      for (const ParameterSlice& slice : bucket.slices) {
        if (bucket.sparse || units_of(slice, bucket).count() <= 1) continue;
        const Question question{{settings_.adaptive, kLooksAfterPay, false}};
        divided.push_back(
            {slice.parameter, !bucket.is_on_cpu(), bucket.narrow_forms().front() != Width::kFull, question, question});
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
  objections_ = UsageMask(divided_.size() * (asks_for_rows() + asks_for_widths()), true);
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

double UnitsDetector::least_narrow_fraction() const {
  return std::max(kLeastNarrow, settings_.adaptive.min_zero_fraction);
}

UsageMask UnitsDetector::objections(bool none) {
  if (none) return UsageMask(objections_.size());
  for (Sample& sample : samples_) {
    const std::vector<SampledUnits>& found = sample.units.wait();
    for (size_t i = 0; i < found.size(); ++i) {
      const size_t divided = sample.divided[i];
      if (asks_for_rows() && found[i].zero_fraction >= least_zero_fraction()) objections_.clear(divided);
      if (asks_for_widths() && found[i].narrow_fraction * (1 - found[i].zero_fraction) >= least_narrow_fraction()) {
        objections_.clear(widths_bit(divided));
      }
    }
  }
  samples_.clear();
  return objections_;
}

bool UnitsDetector::may_choose() const {
  // What is chosen for the first time has to be looked through once.
  return std::any_of(divided_.begin(), divided_.end(), [&](const Divided& divided) {
    return divided.rows.rule.is_on() || divided.widths.rule.is_on() || settings_.skip_zero_rows == When::kOn ||
           settings_.narrow == When::kOn;
  });
}

// On a device a question that may be asked in the next step has been looked at by every rank then, because its
// parameter travels whole in this one.
bool UnitsDetector::ask(When when, Question& question, bool objected, bool on_device, int64_t step) const {
  if (when == When::kOff) return false;
  const bool is_due = question.rule.is_due(step);
  question.asked = when == When::kOn || question.rule.is_on() || (is_due && !objected);
  if (question.asked) {
    question.looked_at = false;
  } else if (on_device) {
    if (is_due && question.looked_at) question.rule.pause(step);
    question.looked_at = question.rule.is_due(step + 1);
  }
  return question.asked;
}

ChosenUnits UnitsDetector::choose(const UsageMask& used, const UsageMask& objections, int64_t step) {
  ChosenUnits chosen{UsageMask(used.size()), UsageMask(used.size()), false};
  for (size_t i = 0; i < divided_.size(); ++i) {
    Divided& divided = divided_[i];
    if (!used.test(divided.parameter)) continue;
    const bool rows =
        ask(settings_.skip_zero_rows, divided.rows, asks_for_rows() && objections.test(i), divided.on_device, step);
    const bool objected = !rows && asks_for_widths() && objections.test(widths_bit(i));
    const bool widths =
        divided.may_be_narrow && ask(settings_.narrow, divided.widths, objected, divided.on_device && !rows, step);
    chosen.asks_rows = chosen.asks_rows || rows;
    if (rows || widths) chosen.parameters.set(divided.parameter);
    if (widths) chosen.widths.set(divided.parameter);
  }
  return chosen;
}

bool UnitsDetector::is_due(size_t parameter, int64_t next) {
  const Divided* divided = find(parameter);
  if (divided == nullptr) return false;
  return (asks_for_rows() && divided->rows.rule.is_due(next)) ||
         (asks_for_widths() && divided->may_be_narrow && divided->widths.rule.is_due(next));
}

void UnitsDetector::look(const BucketLayout& bucket, const at::Tensor& flat, const BucketViews& views,
                         const UsageMask& whole, int64_t next) {
  Sample sample;
  std::vector<UnitsOfSlice> gradients;
  const auto object = [&](size_t divided, bool objects) {
    for (const size_t bit : {asks_for_rows() ? divided : objections_.size(),
                             asks_for_widths() ? widths_bit(divided) : objections_.size()}) {
      if (bit == objections_.size()) continue;
      objects ? objections_.set(bit) : objections_.clear(bit);
    }
  };
  for (const ParameterSlice& slice : bucket.slices) {
    if (!whole.test(slice.parameter) || !is_due(slice.parameter, next)) continue;
    const auto index = static_cast<size_t>(find(slice.parameter) - divided_.data());
    if (!views.has_gradient(slice.parameter)) {
      object(index, false);  // nothing is as good as zeros
      continue;
    }
    SliceOfTensor gradient{flat, slice.offset, slice.length};
    if (views.is_detached(slice.parameter)) {
      gradient = {views.find_to_read(slice.parameter), 0, slice.length};
      if (!gradient.flat.defined()) continue;
    }
    object(index, true);
    sample.divided.push_back(index);
    gradients.push_back({std::move(gradient), units_of(slice, bucket).length});
  }
  if (gradients.empty()) return;
  RECORD_FUNCTION("ddp_hooks::sample", std::vector<c10::IValue>());
  sample.units = start_unit_sample(gradients, asks_for_widths());
  samples_.push_back(std::move(sample));
}

bool UnitsDetector::observe(size_t parameter, int64_t step, int64_t elements, const SentElements& sent) {
  Divided* divided = find(parameter);
  if (divided == nullptr) return false;
  const auto learn = [&](Question& question, double saved) {
    return question.asked && question.rule.observe(step, saved, static_cast<double>(elements));
  };
  const bool rows = learn(divided->rows, static_cast<double>(elements) - sent.at_full_width);
  const bool widths = learn(divided->widths, sent.at_full_width - sent.elements);
  return rows || widths;
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
