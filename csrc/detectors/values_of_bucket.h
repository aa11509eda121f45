// One rank's part of `skip_zeros` for one bucket: which of the slices that some rank uses hold a non-zero here.
//
// Gradients are read where they lie. What turns out zero on every rank is not sent; where this rank has a gradient of
// zeros it stays as it is, and where it has none the view is filled with zeros for the Reducer to make one.
//
// Always holds: a slice counts as zero only when every element is +0.0 or -0.0. On a device the scan is awaited by its
// event, when somebody asks for the answer.
// Thread-safety: none; the engine locks. Ranks differ in what they find; they agree on what `settle` is told.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/nonzero_scan.h"
#include "layout/bucket_layout.h"
#include "layout/usage_mask.h"
#include "reducer/bucket_views.h"

namespace ddp_hooks {

class ValuesOfBucket {
 public:
  explicit ValuesOfBucket(const BucketLayout& layout) : layout_(layout) {}

  // Starts to scan one slice of the bucket, `flat`, or the gradient that belongs there.
  void add(uint32_t slice, const at::Tensor& flat, BucketViews& views);
  void start();

  // The slices, by their positions in the layout, that hold a non-zero here. Waits for the scan.
  UsageMask nonzero();

  // Takes out of `agreed` what no rank found a non-zero in.
  void settle(const UsageMask& nonzero_anywhere, UsageMask& agreed, BucketViews& views);

 private:
  const BucketLayout& layout_;
  std::vector<uint32_t> scanned_;
  std::vector<SliceOfTensor> places_;
  PendingScan scan_;
};

}  // namespace ddp_hooks
