#include "detectors/values_of_step.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <vector>

namespace ddp_hooks {
namespace {

int64_t bytes_in(const UsageMask& mask, const BucketLayout& bucket) {
  int64_t elements = 0;
  for (const ParameterSlice& slice : bucket.slices) {
    if (mask.test(slice.parameter)) elements += slice.length;
  }
  return elements * bucket.element_bytes;
}

bool any_in(const UsageMask& mask, const BucketLayout& bucket) {
  return std::any_of(bucket.slices.begin(), bucket.slices.end(),
                     [&](const ParameterSlice& slice) { return slice.length > 0 && mask.test(slice.parameter); });
}

}  // namespace

void ValuesOfStep::bucket_ready(uint32_t bucket, const std::optional<at::Tensor>& flat, UsageMask& local,
                                UsageMask& agreed, const std::function<void(uint32_t)>& settled) {
  pipeline_.add(bucket, scan(bucket, flat, local, agreed));
  pipeline_.advance(
      bucket, bucket + 1 == step_.layout.buckets.size(),
      [&](Bucket& scanned) { start_exchange(scanned, local, agreed); },
      [&](Bucket& first) {
        settle(first, agreed);
        settled(first.index);
        return true;
      });
}

ValuesOfStep::Bucket ValuesOfStep::scan(uint32_t index, const std::optional<at::Tensor>& flat, const UsageMask& local,
                                        const UsageMask& agreed) {
  RECORD_FUNCTION("ddp_hooks::scan", std::vector<c10::IValue>());
  const BucketLayout& layout = step_.layout.buckets[index];
  Bucket bucket{index, ValuesOfBucket(layout), nullptr};
  if (!flat) return bucket;
  for (uint32_t i = 0; i < layout.slices.size(); ++i) {
    const size_t parameter = layout.slices[i].parameter;
    // Undefined gradients are zeros, which the Reducer fills in.
    if (agreed.test(parameter) && (local.test(parameter) || step_.views.has_gradient(parameter))) {
      bucket.here.add(i, *flat, step_.views);
    }
  }
  bucket.here.start();
  return bucket;
}

void ValuesOfStep::start_exchange(Bucket& bucket, UsageMask& local, const UsageMask& agreed) {
  const BucketLayout& layout = step_.layout.buckets[bucket.index];
  if (layout.sparse || !any_in(agreed, layout)) return;
  const UsageMask nonzero = bucket.here.nonzero();
  for (uint32_t i = 0; i < layout.slices.size(); ++i) {
    const size_t parameter = layout.slices[i].parameter;
    // Others have not been scanned here: what is agreed on by units, say.
    if (agreed.test(parameter) && !nonzero.test(i)) local.clear(parameter);
  }
  bucket.exchange = step_.agreement.start_exchange(nonzero, step_.layout_hash, values_phase(bucket.index));
}

void ValuesOfStep::settle(Bucket& bucket, UsageMask& agreed) {
  if (!bucket.exchange) return;
  const BucketLayout& layout = step_.layout.buckets[bucket.index];
  const int64_t before = bytes_in(agreed, layout);
  bucket.here.settle(step_.agreement.wait(*bucket.exchange), agreed, step_.views);
  used_bytes_ += before;
  zero_bytes_ += before - bytes_in(agreed, layout);
}

}  // namespace ddp_hooks
