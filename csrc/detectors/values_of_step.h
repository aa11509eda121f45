// `skip_zeros`'s part of one step: each bucket's zeros are found, agreed on, and then the bucket may be sent.
//
// Thread-safety: none; the engine locks. Every rank must agree on: the layout, the agreed mask, the pipeline's timing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "agreement/mask_exchange.h"
#include "detectors/bucket_pipeline.h"
#include "detectors/detected_step.h"
#include "detectors/values_of_bucket.h"
#include "layout/usage_mask.h"

namespace ddp_hooks {

class ValuesOfStep {
 public:
  explicit ValuesOfStep(const DetectedStep& step) : step_(step), pipeline_(step.timing) {}

  // The bucket is ready: `flat`, or nothing where there is nothing to scan. What is zero in `local`, and what is
  // zero on every rank in `agreed`, is cleared, bucket by bucket; `settled` is called with each bucket that is through.
  void bucket_ready(uint32_t bucket, const std::optional<at::Tensor>& flat, UsageMask& local, UsageMask& agreed,
                    const std::function<void(uint32_t)>& settled);

  // Of the buckets that were settled: what `skip_unused` would have sent, and how much of it was zero everywhere.
  int64_t used_bytes() const { return used_bytes_; }
  int64_t zero_bytes() const { return zero_bytes_; }

 private:
  struct Bucket {
    uint32_t index = 0;
    ValuesOfBucket here;
    std::unique_ptr<PendingExchange> exchange;  // null before it starts, and where the bucket needs none
  };
  Bucket scan(uint32_t index, const std::optional<at::Tensor>& flat, const UsageMask& local, const UsageMask& agreed);
  void start_exchange(Bucket& bucket, UsageMask& local, const UsageMask& agreed);
  void settle(Bucket& bucket, UsageMask& agreed);

  const DetectedStep step_;
  BucketPipeline<Bucket> pipeline_;
  int64_t used_bytes_ = 0;
  int64_t zero_bytes_ = 0;
};

}  // namespace ddp_hooks
