// What a step finds inside the parameters that were chosen for it: which of their units some rank uses.
//
// Each bucket that holds such a parameter has an exchange of its own, of one mask for all of them, compressed. Buckets
// are pipelined as in ValuesOfStep: while the masks of one are under way, the next is scanned; and where ranks use
// different parameters, nobody waits before the last bucket is ready.
//
// Gradients are read, and sent from, where they lie, in .grad or in the bucket; nothing is copied for it.
//
// Always holds: buckets are settled in order, each once, all of them when the last one is ready. A unit counts as
// unused only when every element of it is +0.0 or -0.0 on every rank; then it is +0.0 on all of them.
// Thread-safety: none; the engine locks. Every rank must agree on: the layout, what was chosen, `settles_last`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "agreement/usage_agreement.h"
#include "detectors/looked_up_rows.h"
#include "detectors/units_detector.h"
#include "kernels/unit_scan.h"
#include "layout/bucket_layout.h"
#include "layout/contributors.h"
#include "layout/units.h"
#include "layout/usage_mask.h"
#include "reducer/bucket_views.h"

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
  std::vector<int64_t> by_rank;  // empty where nobody knows
};

class UnitsOfStep {
 public:
  // All references have to outlive it. `chosen`: the parameters. `answers_later`: scans run on a device, while the host
  // goes on.
  UnitsOfStep(const LayoutOfBuckets& layout, uint64_t layout_hash, UsageAgreement& agreement, BucketViews& views,
              const LookedUpRows& looked_up, UnitsDetector& detector, UsageMask chosen, int64_t step_number,
              bool settles_last, bool answers_later)
      : layout_(layout),
        layout_hash_(layout_hash),
        agreement_(agreement),
        views_(views),
        looked_up_(looked_up),
        detector_(detector),
        chosen_(std::move(chosen)),
        step_number_(step_number),
        settles_last_(settles_last),
        answers_later_(answers_later) {}

  const UsageMask& chosen() const { return chosen_; }
  bool concerns(uint32_t bucket) const;

  // The next bucket is ready, `flat`; this rank uses `local`. `settled` is called with each bucket that is through,
  // what it holds, which of their units some rank uses, and if that is known, which ranks those are; it returns how
  // many elements of each gradient are sent, counted at their transports' costs.
  using Settled = std::function<std::vector<int64_t>(uint32_t, const std::vector<DividedGradient>&, const UsageMask&,
                                                     const Contributors&)>;
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
    uint32_t exchanged_with = 0;                // the bucket that was ready when it started
  };
  void scan(uint32_t bucket, const at::Tensor& flat, const UsageMask& local);
  PendingUnitScan start_scan(const DividedGradient& divided) const;
  UsageMask found_here(Bucket& bucket);
  void start_exchange(Bucket& bucket, uint32_t ready, size_t capacity_words);
  bool try_settle(Bucket& bucket, uint32_t ready, const Settled& settled);

  const LayoutOfBuckets& layout_;
  const uint64_t layout_hash_;
  UsageAgreement& agreement_;
  BucketViews& views_;
  const LookedUpRows& looked_up_;
  UnitsDetector& detector_;
  const UsageMask chosen_;
  const int64_t step_number_;
  const bool settles_last_;
  const bool answers_later_;
  std::deque<Bucket> pending_;  // scanned and not settled, in order
  std::vector<UnitCounts> counts_;
};

}  // namespace ddp_hooks
