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

void ValuesOfStep::bucket_ready(const std::optional<at::Tensor>& flat, UsageMask& local, UsageMask& agreed,
                                const std::function<void(uint32_t)>& settled) {
  scan(flat, local, agreed);
  const auto count = static_cast<uint32_t>(values_.size());
  const bool last = count == layout_.buckets.size();
  // A device scans while the host goes on, so there the answer is asked for one bucket later.
  const uint32_t scanned = last || !answers_later_ ? count : count - 1;
  for (; exchanged_ < scanned; ++exchanged_) start_exchange(exchanged_, local, agreed);
  const uint32_t ready = last ? count : settles_last_ || scanned == 0 ? 0 : scanned - 1;
  while (settled_ < ready) {
    const uint32_t bucket = settled_++;
    settle(bucket, agreed);
    settled(bucket);
  }
}

void ValuesOfStep::scan(const std::optional<at::Tensor>& flat, const UsageMask& local, const UsageMask& agreed) {
  RECORD_FUNCTION("ddp_hooks::scan", std::vector<c10::IValue>());
  const BucketLayout& layout = layout_.buckets[values_.size()];
  ValuesOfBucket& values = values_.emplace_back(Values{ValuesOfBucket(layout), nullptr}).here;
  if (!flat) return;
  for (uint32_t i = 0; i < layout.slices.size(); ++i) {
    const size_t parameter = layout.slices[i].parameter;
    // Undefined gradients are zeros, which the Reducer fills in.
    if (agreed.test(parameter) && (local.test(parameter) || views_.has_gradient(parameter))) {
      values.add(i, *flat, views_);
    }
  }
  values.start();
}

void ValuesOfStep::start_exchange(uint32_t bucket, UsageMask& local, const UsageMask& agreed) {
  const BucketLayout& layout = layout_.buckets[bucket];
  if (layout.sparse || !any_in(agreed, layout)) return;
  const UsageMask nonzero = values_[bucket].here.nonzero();
  for (uint32_t i = 0; i < layout.slices.size(); ++i) {
    const size_t parameter = layout.slices[i].parameter;
    // Others have not been scanned here: what is agreed on by units, say.
    if (agreed.test(parameter) && !nonzero.test(i)) local.clear(parameter);
  }
  values_[bucket].exchange = agreement_.start_exchange(nonzero, layout_hash_, values_phase(bucket));
}

void ValuesOfStep::settle(uint32_t bucket, UsageMask& agreed) {
  PendingExchange* exchange = values_[bucket].exchange.get();
  if (exchange == nullptr) return;
  const BucketLayout& layout = layout_.buckets[bucket];
  const int64_t before = bytes_in(agreed, layout);
  values_[bucket].here.settle(agreement_.wait(*exchange), agreed, views_);
  used_bytes_ += before;
  zero_bytes_ += before - bytes_in(agreed, layout);
}

}  // namespace ddp_hooks
