// In which parameters it pays to agree on units, and how much room their masks need.
//
// Each rank looks at a sample of the units of its own gradients, and objects to a parameter if too few are zero;
// objections travel with the next step's usage masks. To what no rank objects, all of them agree on units. What they
// then find tells exactly what that saves, and decides whether they go on: if it is too little, they leave it for a
// while, which doubles each time.
//
// A look at a dense gradient costs the CPU a glance, so it looks in every step. A device it costs a launch, and its
// host more than that, so there they leave for a while, too, what they have looked at and some rank objects to.
//
// Thread-safety: none; the engine locks. Ranks differ in their samples, and so in what they object to. Every rank must
// agree on everything else: the layout, the settings, the agreed masks, the step number.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "detectors/values_probe.h"
#include "kernels/unit_sample.h"
#include "layout/bucket_layout.h"
#include "layout/units.h"
#include "layout/usage_mask.h"
#include "reducer/bucket_views.h"

namespace ddp_hooks {

struct UnitsSettings {
  ValuesDetector detector = ValuesDetector::kOff;
  UnitSettings units;
  ProbeSettings probe;  // of the adaptive one
};

class UnitsDetector {
 public:
  explicit UnitsDetector(const UnitsSettings& settings) : settings_(settings) {}

  // To be called before anything else, and when the layout has changed.
  void use_layout(const LayoutOfBuckets& layout);

  // How a slice of the bucket falls apart.
  Units units_of(const ParameterSlice& slice, const BucketLayout& bucket) const;

  // With less than this part of its sampled units zero, a rank objects.
  double least_zero_fraction() const;
  // A bit for each parameter with more than one unit, in the order of their indices; of size 0 where nobody asks.
  // Waits for samples that are still being taken, on a device.
  UsageMask objections(bool none);
  // Whether units of some parameter may be agreed on in the next step.
  bool may_choose() const;
  // In which of the `used` parameters units are agreed on in this step; `objections` are every rank's.
  UsageMask choose(const UsageMask& used, const UsageMask& objections, int64_t step);

  // Whether a parameter may be chosen in the step `next` if nobody objects. The same on every rank.
  bool is_due(size_t parameter, int64_t next);
  // Takes a sample of a bucket's gradients, for what is due in the step `next`: of those that travel `whole` in this
  // one. `flat` is the bucket.
  void look(const BucketLayout& bucket, const at::Tensor& flat, const BucketViews& views, const UsageMask& whole,
            int64_t next);
  // What was agreed on in a parameter that was: how many of its elements are sent. Returns whether that pays.
  bool observe(size_t parameter, int64_t step, int64_t elements, int64_t sent_elements);

  // How many words the compressed masks of these parameters of a bucket may take: what they needed before, and some.
  size_t capacity_words(uint32_t bucket, const std::vector<size_t>& parameters, size_t bits) const;
  void note_needed_words(uint32_t bucket, const std::vector<size_t>& parameters, size_t needed);

 private:
  struct Divided {
    size_t parameter = 0;
    bool on_device = false;
    bool looked_at = false;  // by every rank, on a device, since it was left alone
    bool pays = false;       // in the last step it did
    int64_t pause = 0;       // how long to leave it when it does not
    int64_t next_step = 0;   // not before this one
  };
  struct Needed {
    std::vector<size_t> parameters;
    size_t words = 0;
  };
  Divided* find(size_t parameter);
  void leave_alone(Divided& divided, int64_t step) const;
  bool is_adaptive() const { return settings_.detector == ValuesDetector::kAdaptive; }

  UnitsSettings settings_;
  std::vector<Divided> divided_;                                            // by the parameters' indices
  UsageMask objections_;                                                    // a bit for each of them
  std::vector<std::pair<std::vector<size_t>, PendingUnitSample>> samples_;  // whose objections
  std::vector<Needed> needed_;                                              // by bucket
};

}  // namespace ddp_hooks
