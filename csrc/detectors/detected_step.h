// A step as its detectors see it: where gradients lie, with whom to agree on them, and when.
//
// Thread-safety: none; the engine locks, and what is referred to outlives the step. Every rank must agree on: the
// layout, the timing.
#pragma once

#include <cstdint>

#include "agreement/usage_agreement.h"
#include "detectors/bucket_pipeline.h"
#include "layout/bucket_layout.h"
#include "reducer/bucket_views.h"

namespace ddp_hooks {

struct DetectedStep {
  const LayoutOfBuckets& layout;
  uint64_t layout_hash;
  UsageAgreement& agreement;
  BucketViews& views;
  PipelineTiming timing;
  bool shadow = false;  // this rank has joined, and has nothing to look into
};

}  // namespace ddp_hooks
