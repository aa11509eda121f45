// One synchronised backward pass as the wire sees it: its buckets, and what their messages are made from.
//
// Shared by the engine, which makes it, and by the completions of the messages it launched, which run in other threads.
// Always holds: a bucket's future is completed exactly once: when its last message is back, or by the first failure.
// Thread-safety: `message_done` and `fail` may be called from any thread; everything else belongs to the engine.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "layout/contributors.h"
#include "layout/usage_mask.h"
#include "plan/reduction_plan.h"

namespace ddp_hooks {

class BucketInFlight {
 public:
  BucketInFlight(at::Tensor buffer, c10::intrusive_ptr<c10::ivalue::Future> future)
      : buffer_(std::move(buffer)), future_(std::move(future)) {}

  // How many messages carry parts of this bucket; completes it at once when none does. Call before launching any.
  void expect_messages(int32_t count);
  // Keeps the bucket from completing until it is released, for messages that are not counted yet.
  void hold() { outstanding_ += 1; }
  void release() { count_off(); }
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
  void complete();

  std::atomic<int32_t> outstanding_{0};
  std::atomic<bool> finished_{false};
  // On a device: where the messages that are back ended, each on a stream of its own. The future follows all of them.
  std::mutex events_mutex_;
  std::vector<c10::Event> events_;
};

struct StepInFlight {
  // A deque, because completions point to buckets while later ones are added.
  std::deque<BucketInFlight> buckets;
  bool shadow = false;         // this rank has joined and only plays along
  bool nobody_joined = false;  // as far as it was agreed; without an exchange nobody knows
  double divisor = 1;          // what gradients are divided by before they are summed
  Contributors contributors;   // of each parameter, as far as that was agreed
  UsageMask agreed;            // `skip_zeros` clears bits as buckets settle
  // Of what is known before the first bucket leaves.
  std::shared_ptr<const ReductionPlan> plan;
  UsageMask copied_early;  // these parameters' gradients lie in their places already; scaled, unless they are coded
  size_t next_staging = 0;
  // What this rank has coded, in bytes before and after. Outlives the step, whose completions add to it.
  struct CodedBytes {
    std::atomic<int64_t> contribution_bytes{0};
    std::atomic<int64_t> coded_contribution_bytes{0};
    std::atomic<int64_t> sum_bytes{0};
    std::atomic<int64_t> coded_sum_bytes{0};
  };
  const std::shared_ptr<CodedBytes> coded = std::make_shared<CodedBytes>();
  int64_t coded_messages = 0;  // so far
  // Messages that are under way or have failed: somebody may still write to their memory. Outlives the step.
  const std::shared_ptr<std::atomic<int64_t>> messages_not_back = std::make_shared<std::atomic<int64_t>>(0);
  std::exception_ptr error;  // once set, the buckets still to come fail with it
  // Buckets may be those of another step by now, so that what comes back is not written into them.
  std::atomic<bool> has_failed{false};

  void fail(const std::exception_ptr& reason);
  // Where DDP was told to go on after a pass that failed half-way (`_update_process_group`).
  void break_off();
};

}  // namespace ddp_hooks
