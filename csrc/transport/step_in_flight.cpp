#include "transport/step_in_flight.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <utility>

#include "kernels/devices.h"

namespace ddp_hooks {

void BucketInFlight::expect_messages(int32_t count) {
  // One more than the messages, given back here, so that the bucket cannot complete before the count stands.
  outstanding_ += count + 1;
  count_off();
}

void BucketInFlight::message_done() {
  if (!buffer_.is_cpu() && outstanding_ > 1) {
    c10::Event end(buffer_.device().type());
    end.record(current_stream(buffer_.device()));
    std::lock_guard lock(events_mutex_);
    events_.push_back(std::move(end));
  }
  count_off();
}

void BucketInFlight::count_off() {
  if (--outstanding_ > 0 || finished_.exchange(true)) return;
  // Nobody adds events any more.
  if (events_.empty()) return complete();
  // On a stream of its own: this may be the one that backward goes on with, which is not to wait for messages.
  const c10::Device device = buffer_.device();
  c10::Event here(device.type());
  here.record(current_stream(device));
  const c10::StreamGuard guard(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  here.block(guard.current_stream());
  for (const c10::Event& end : events_) end.block(current_stream(device));
  complete();
}

void BucketInFlight::complete() {
  future_->markCompleted(result_.defined() ? result_ : buffer_);
}

void BucketInFlight::fail(const std::exception_ptr& error) {
  if (!finished_.exchange(true)) future_->setError(error);
}

at::Tensor BucketInFlight::flat() const {
  const at::Tensor real = buffer_.is_complex() ? at::view_as_real(buffer_) : buffer_;
  return real.view({-1});
}

void StepInFlight::fail(const std::exception_ptr& reason) {
  error = reason;
  has_failed = true;
  for (BucketInFlight& bucket : buckets) bucket.fail(reason);
}

void StepInFlight::break_off() {
  fail(std::make_exception_ptr(
      std::runtime_error("ddp_hooks: this backward pass broke off before its gradients were averaged; discard them and "
                         "repeat the step on every rank")));
}

}  // namespace ddp_hooks
