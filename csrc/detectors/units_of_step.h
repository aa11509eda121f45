// What a step finds inside the parameters that were chosen for it: which of their units some rank uses, and how wide
// these are.
//
// Each bucket that holds such a parameter has an exchange of its own, of one mask for all of them, compressed: first
// each one's bits of what is used, then those that rule out narrow forms, of the parameters that were asked for them.
//
// Gradients are read, and sent from, where they lie, in .grad or in the bucket; nothing is copied for it.
//
// Always holds: a unit counts as unused only when every element of it is +0.0 or -0.0 on every rank; then it is +0.0 on
// all of them. Thread-safety: none; the engine locks. Every rank must agree on: the layout, what was chosen, the
// pipeline's timing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "agreement/mask_exchange.h"
#include "detectors/bucket_pipeline.h"
#include "detectors/detected_step.h"
#include "detectors/looked_up_rows.h"
#include "detectors/units_detector.h"
#include "kernels/unit_scan.h"
#include "layout/contributors.h"
#include "layout/units.h"
#include "layout/usage_mask.h"

namespace ddp_hooks {

// One parameter of a bucket, and where its units stand in the bucket's mask.
struct DividedGradient {
  size_t parameter = 0;
  SliceOfTensor gradient;
  Units units;
};

// How many of a parameter's units were used in a step.
struct UnitCounts {
  size_t parameter = 0;
  int64_t units = 0;
  int64_t here = 0;
  int64_t anywhere = 0;
  int64_t narrow = 0;            // of those anywhere
  std::vector<int64_t> by_rank;  // empty where nobody knows
};

// A bucket that is through.
struct SettledUnits {
  uint32_t bucket = 0;
  const std::vector<DividedGradient>& gradients;
  const UsageMask& used;             // which of their units some rank uses, and what rules out narrow forms
  const Contributors& contributors;  // and if that is known, which ranks those are
};

class UnitsOfStep {
 public:
  // The references have to outlive it.
  UnitsOfStep(const DetectedStep& step, const LookedUpRows& looked_up, UnitsDetector& detector, ChosenUnits chosen,
              int64_t step_number)
      : step_(step),
        looked_up_(looked_up),
        detector_(detector),
        chosen_(std::move(chosen)),
        step_number_(step_number),
        pipeline_(step.timing) {}

  const UsageMask& chosen() const { return chosen_.parameters; }
  bool concerns(uint32_t bucket) const;

  // The bucket is ready, `flat`; this rank uses `local`. `settled` returns what is sent of each gradient.
  using Settled = std::function<std::vector<SentElements>(const SettledUnits&)>;
  void bucket_ready(uint32_t bucket, const at::Tensor& flat, const UsageMask& local, const Settled& settled);

  // Of the buckets that were settled.
  const std::vector<UnitCounts>& counts() const { return counts_; }

 private:
  struct Bucket {
    uint32_t index = 0;
    std::vector<DividedGradient> gradients;
    std::vector<PendingUnitScan> scans;  // of each gradient; of nothing where this rank has none
    size_t bits = 0;
    std::vector<int64_t> used_here;  // units of each gradient
    size_t capacity_words = 0;
    std::unique_ptr<PendingExchange> exchange;  // null before it starts
  };
  Bucket scan(uint32_t index, const at::Tensor& flat, const UsageMask& local);
  PendingUnitScan start_scan(const DividedGradient& divided) const;
  UsageMask found_here(Bucket& bucket);
  void start_exchange(Bucket& bucket, size_t capacity_words);
  bool try_settle(Bucket& bucket, const Settled& settled);

  const DetectedStep step_;
  const LookedUpRows& looked_up_;
  UnitsDetector& detector_;
  const ChosenUnits chosen_;
  const int64_t step_number_;
  BucketPipeline<Bucket> pipeline_;
  std::vector<UnitCounts> counts_;
};

}  // namespace ddp_hooks
