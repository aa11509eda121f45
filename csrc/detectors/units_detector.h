// In which parameters it pays to agree on units, and how much room their masks need.
//
// Are many of a parameter's rows zero? Each rank looks at a sample of the units of its own gradients, and objects to
// asking if the answer would save too little; objections travel with the next step's usage masks. What no rank objects
// to, all of them ask. What they then find tells exactly what that saves, and decides whether they go on: if it is too
// little, they leave it for a while, which doubles each time.
//
// On the CPU, sampling a dense gradient is cheap, so each rank samples in every step. On a device, sampling takes a
// launch and delays the host, so ranks stop sampling a parameter for a while after some rank has objected to it.
//
// Thread-safety: none; the engine locks. Ranks differ in their samples, and so in what they object to. Every rank must
// agree on everything else: the layout, the settings, the agreed masks, the step number.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "detectors/adaptive_rule.h"
#include "kernels/unit_sample.h"
#include "layout/bucket_layout.h"
#include "layout/transports.h"
#include "layout/units.h"
#include "layout/usage_mask.h"
#include "reducer/bucket_views.h"

namespace ddp_hooks {

struct UnitsSettings {
  When skip_zero_rows = When::kOff;
  UnitSettings units;
  AdaptiveSettings adaptive;
};

// What a step agrees on by units.
struct ChosenUnits {
  UsageMask divided;   // parameters that are divided into their units
  bool whole = false;  // every other used parameter is a unit of its own

  bool is_empty() const { return !whole && divided.count() == 0; }
};

class UnitsDetector {
 public:
  explicit UnitsDetector(const UnitsSettings& settings) : settings_(settings) {}

  // To be called before anything else, and when the layout has changed.
  void use_layout(const LayoutOfBuckets& layout);

  // How a slice of the bucket falls apart.
  Units units_of(const ParameterSlice& slice, const BucketLayout& bucket) const;

  // With less than this part of its sampled units zero, a rank objects to asking.
  double least_zero_fraction() const;
  // A bit for each parameter with more than one unit, in the order of their indices; of size 0 where nobody asks
  // adaptively. Waits for samples that are still being taken, on a device.
  UsageMask objections(bool none);
  // Whether units of some parameter may be agreed on in the next step.
  bool may_choose() const;
  // In which of the `used` parameters units are agreed on in this step; `objections` are every rank's.
  ChosenUnits choose(const UsageMask& used, const UsageMask& objections, int64_t step);

  // Whether a parameter may be chosen in the step `next`, if nobody objects. The same on every rank.
  bool is_due(size_t parameter, int64_t next);
  // Takes a sample of a bucket's gradients, for what is due in the step `next`: of those that travel `whole` in this
  // one. `flat` is the bucket.
  void look(const BucketLayout& bucket, const at::Tensor& flat, const BucketViews& views, const UsageMask& whole,
            int64_t next);
  // How many of a parameter's `elements` are sent, each counted at its relative cost, if it was chosen in this `step`.
  // Returns whether asking paid.
  bool observe(size_t parameter, int64_t step, int64_t elements, double sent);

  // How many words the compressed masks of these parameters of a bucket may take: what they needed before, and some.
  // `bits`: of the mask.
  size_t capacity_words(uint32_t bucket, const std::vector<size_t>& parameters, size_t bits) const;
  void note_needed_words(uint32_t bucket, const std::vector<size_t>& parameters, size_t bits, size_t needed);

 private:
  struct Divided {
    size_t parameter = 0;
    bool on_device = false;
    AdaptiveRule rule;
    bool asked = false;      // in this step
    bool looked_at = false;  // by every rank, on a device, since it was left alone
  };
  struct Needed {
    std::vector<size_t> parameters;
    size_t bits = 0;
    size_t words = 0;
  };
  struct Sample {
    std::vector<size_t> divided;  // indices
    PendingUnitSample units;
  };
  Divided* find(size_t parameter);
  bool ask(Divided& divided, bool objected, int64_t step) const;
  bool is_adaptive() const { return settings_.skip_zero_rows == When::kAdaptive; }

  UnitsSettings settings_;
  std::vector<Divided> divided_;  // by the parameters' indices
  UsageMask objections_;
  std::vector<Sample> samples_;
  std::vector<Needed> needed_;  // by bucket
};

}  // namespace ddp_hooks
