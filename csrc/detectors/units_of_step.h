// What a step finds inside its gradients: which of their units some rank uses.
//
// A parameter that was chosen for it is divided into its units. With `skip_zeros`, every other parameter is a unit of
// its own. Each bucket that holds such a parameter has an exchange of its own, of one compressed mask: first a bit for
// each undivided parameter, then the bits of each divided one.
//
// Gradients are read where they lie, in .grad or in the bucket; of an embedding, only the rows that were looked up
// (`LookedUpRows`). A bit is set if its unit holds a non-zero. Those of divided parameters are also sent from there,
// and written there. What no rank uses is not sent: if this rank has a gradient of zeros it stays, each of them +0.0,
// and if it has none the view is filled with zeros for the Reducer to make one. `BucketPipeline` says when a bucket's
// exchange starts and when it is waited for.
//
// Always holds: a unit counts as unused only when every element of it is +0.0 or -0.0 on every rank; then it is +0.0 on
// all of them. Thread-safety: none; the engine locks. Every rank must agree on: the layout, what was chosen, the
// pipeline's timing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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
struct GradientInUnits {
  size_t parameter = 0;
  int64_t offset = 0;  // in the bucket
  SliceOfTensor gradient;
  Units units;
  bool is_divided = false;  // sent from where it lies; otherwise with its bucket
};

// How many of a divided parameter's units were used in a step.
struct UnitCounts {
  size_t parameter = 0;
  int64_t units = 0;
  int64_t here = 0;
  int64_t anywhere = 0;
  std::vector<int64_t> by_rank;  // empty where nobody knows, and where ranks of a host add up
};

// A bucket that is through.
struct SettledUnits {
  uint32_t bucket = 0;
  const std::vector<GradientInUnits>& gradients;
  const UsageMask& used;             // which of their units some rank uses
  const Contributors& contributors;  // and if that is known, which ranks or hosts those are
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

  const ChosenUnits& chosen() const { return chosen_; }
  // Whether the bucket is settled, and what it says is sent only then.
  bool concerns(uint32_t bucket) const;

  // Looks into a bucket that this concerns, `flat`, with which or after which `ready` has become ready; this rank uses
  // `local`, and some rank `agreed`.
  void scan(uint32_t bucket, uint32_t ready, const at::Tensor& flat, const UsageMask& local, const UsageMask& agreed);
  // The bucket is ready, and all up to it have been looked into. Undivided parameters are cleared from `local` if they
  // are zero here, and from `agreed` if they are zero on every rank. `settled` is called with each bucket that is
  // through, and returns what is sent of each gradient.
  using Settled = std::function<std::vector<double>(const SettledUnits&)>;
  void advance(uint32_t ready, UsageMask& local, UsageMask& agreed, const Settled& settled);

  // Of the buckets that were settled:
  const std::vector<UnitCounts>& counts() const { return counts_; }
  // of undivided parameters what `skip_unused` would have sent, and how much of it was zero everywhere.
  int64_t whole_bytes() const { return whole_bytes_; }
  int64_t zero_bytes() const { return zero_bytes_; }

 private:
  struct Bucket {
    uint32_t index = 0;
    std::vector<GradientInUnits> gradients;
    PendingUnitScan scan;
    std::vector<std::optional<size_t>> results;  // of each gradient, its index among the scan's; none without gradient
    size_t bits = 0;
    std::vector<int64_t> used_here;  // units of each gradient
    size_t capacity_words = 0;
    std::unique_ptr<PendingExchange> exchange;  // null before it starts, and where the bucket needs none

    const UnitScanResult& result(size_t gradient);
    std::vector<size_t> parameters() const;
  };
  bool is_chosen(const ParameterSlice& slice, const UsageMask& agreed) const;
  void place_bits(Bucket& bucket) const;
  UnitsToScan to_scan(const GradientInUnits& gradient) const;
  UsageMask found_here(Bucket& bucket) const;
  void start_exchange(Bucket& bucket, size_t capacity_words, UsageMask& local);
  bool try_settle(Bucket& bucket, UsageMask& local, UsageMask& agreed, const Settled& settled);
  void settle_whole(const GradientInUnits& gradient, bool is_used, UsageMask& agreed);
  void count(const Bucket& bucket, size_t index, const UsageMask& anywhere, const Contributors& who);

  const DetectedStep step_;
  const LookedUpRows& looked_up_;
  UnitsDetector& detector_;
  const ChosenUnits chosen_;
  const int64_t step_number_;
  BucketPipeline<Bucket> pipeline_;
  std::vector<UnitCounts> counts_;
  int64_t whole_bytes_ = 0;
  int64_t zero_bytes_ = 0;
};

}  // namespace ddp_hooks
