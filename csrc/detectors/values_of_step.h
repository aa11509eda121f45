// The values detector's part of one step: each bucket's zeros are found, agreed on, and then the bucket may be sent.
//
// Buckets are pipelined: while the masks of one are under way, the next is scanned. Where ranks use different
// parameters, buckets wait for the last one before their masks are waited for: one of the ranks may reach a bucket long
// before another, which stands in some other collective that waits for the first.
//
// Always holds: buckets are settled in order, each once, all of them when the last one is ready.
// Thread-safety: none; the engine locks. Every rank must agree on: the layout, the agreed mask, `settles_last`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "agreement/usage_agreement.h"
#include "detectors/values_of_bucket.h"
#include "layout/bucket_layout.h"
#include "layout/usage_mask.h"
#include "reducer/bucket_views.h"

namespace ddp_hooks {

class ValuesOfStep {
 public:
  // All of them have to outlive it. `answers_later`: scans run on a device, while the host goes on.
  ValuesOfStep(const LayoutOfBuckets& layout, uint64_t layout_hash, UsageAgreement& agreement, BucketViews& views,
               bool settles_last, bool answers_later)
      : layout_(layout),
        layout_hash_(layout_hash),
        agreement_(agreement),
        views_(views),
        settles_last_(settles_last),
        answers_later_(answers_later) {}

  // The next bucket is ready: `flat`, or nothing where there is nothing to scan. What is zero in `local`, and what is
  // zero on every rank in `agreed`, is cleared, bucket by bucket; `settled` is called with each bucket that is through.
  void bucket_ready(const std::optional<at::Tensor>& flat, UsageMask& local, UsageMask& agreed,
                    const std::function<void(uint32_t)>& settled);

  // Of the buckets that were settled: what the graph detector would have sent, and how much of it was zero everywhere.
  int64_t used_bytes() const { return used_bytes_; }
  int64_t zero_bytes() const { return zero_bytes_; }

 private:
  struct Values {
    ValuesOfBucket here;
    std::unique_ptr<PendingExchange> exchange;  // null before it starts, and where the bucket needs none
  };
  void scan(const std::optional<at::Tensor>& flat, const UsageMask& local, const UsageMask& agreed);
  void start_exchange(uint32_t bucket, UsageMask& local, const UsageMask& agreed);
  void settle(uint32_t bucket, UsageMask& agreed);

  const LayoutOfBuckets& layout_;
  const uint64_t layout_hash_;
  UsageAgreement& agreement_;
  BucketViews& views_;
  const bool settles_last_;
  const bool answers_later_;
  std::deque<Values> values_;  // by bucket
  uint32_t exchanged_ = 0;     // for so many of the buckets the exchange has been started
  uint32_t settled_ = 0;
  int64_t used_bytes_ = 0;
  int64_t zero_bytes_ = 0;
};

}  // namespace ddp_hooks
