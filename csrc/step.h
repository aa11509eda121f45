// One synchronised backward pass: its buckets, what was agreed about them, and the messages under way.
//
// Shared by the engine and by the completions of the messages it launched, which run in other threads.
// Always holds: a bucket's future is completed exactly once: when its last message is back, or by the first failure.
// Thread-safety: `message_done` and `fail` may be called from any thread; everything else belongs to the engine.
#pragma once

#include <c10/core/Event.h>

#include <atomic>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "mask_exchange.h"
#include "usage_mask.h"
#include "values_of_bucket.h"
#include "wire_plan.h"

namespace ddp_hooks {

class BucketInFlight {
 public:
  BucketInFlight(at::Tensor buffer, c10::intrusive_ptr<c10::ivalue::Future> future)
      : buffer_(std::move(buffer)), future_(std::move(future)) {}

  // How many messages carry parts of this bucket; completes it at once when none does. Call before launching any.
  void expect_messages(int32_t count);
  // A message is back: at once on the CPU, and on a device when its current stream has come here.
  void message_done();
  void fail(const std::exception_ptr& error);

  // The buffer as the collective sees it: one-dimensional, real, contiguous. Not for sparse buffers.
  at::Tensor flat() const;
  const at::Tensor& buffer() const { return buffer_; }
  // What the future will hold; the buffer itself unless somebody says otherwise.
  void set_result(at::Tensor result) { result_ = std::move(result); }

 private:
  at::Tensor buffer_;
  at::Tensor result_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  void count_off();

  std::atomic<int32_t> outstanding_{0};
  std::atomic<bool> finished_{false};
  // On a device: where the messages that are back ended, each on a stream of its own. The future follows the last.
  std::mutex events_mutex_;
  std::vector<c10::Event> events_;
};

class Step {
 public:
  // A deque, because completions point to buckets while later ones are added.
  std::deque<BucketInFlight> buckets;
  bool shadow = false;  // this rank has joined and only plays along
  double divisor = 1;   // what gradients are divided by before they are summed
  double factor = 1;    // 1 / divisor
  size_t next_staging = 0;
  std::exception_ptr error;  // once set, the buckets still to come fail with it

  bool nobody_joined = false;  // as far as it was agreed; without an exchange nobody knows
  UsageMask local;
  UsageMask agreed;        // the values detector clears bits as buckets settle
  UsageMask used;          // as the graph detector agreed
  bool same_usage = true;  // every rank's local mask is the same
  // Parameters that no rank used, each with its .grad, which the Reducer is about to overwrite.
  std::vector<std::pair<at::Tensor, at::Tensor>> untouched;
  std::vector<at::Tensor> late;  // parameters unknown to the Reducer that some rank may have a gradient for

  // Without values: the whole plan. With values: made bucket by bucket.
  std::shared_ptr<const WirePlan> plan;
  UsageMask brought;  // these parameters' gradients lie in their places already, scaled
  std::optional<WirePlanner> planner;
  struct Values {
    ValuesOfBucket here;
    std::unique_ptr<PendingExchange> exchange;  // null before it starts, and where the bucket needs none
  };
  std::deque<Values> values;  // by bucket
  uint32_t exchanged = 0;     // for so many of the buckets the exchange has been started
  // Buckets wait for the last one before their values are settled: where ranks use different parameters, one of them
  // may reach a bucket long before another, which stands in some other collective that waits for the first.
  bool settles_last = false;
  uint32_t settled = 0;  // so many of the buckets have been settled
  int64_t used_bytes = 0;
  int64_t zero_bytes = 0;

  bool rebuild = false;  // the Reducer is to be made anew after this backward pass

  void fail(const std::exception_ptr& reason);
};

}  // namespace ddp_hooks
