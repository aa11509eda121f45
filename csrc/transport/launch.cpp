#include "transport/launch.h"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "kernels/devices.h"

namespace ddp_hooks {

std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device_type) {
  try {
    return group.getBackend(device_type)->getBackendName();
  } catch (const c10::Error&) {
    return {};
  }
}

bool is_on_streams(const std::string& backend_name, c10::DeviceType device_type) {
  const DeviceKernels* const kernels = find_device_kernels(device_type);
  return kernels != nullptr && std::count(kernels->backends.begin(), kernels->backends.end(), backend_name) > 0;
}

void check_is_complete(c10d::Work& work, c10d::ProcessGroup& group, c10::Device device) {
  TORCH_CHECK(work.getFuture()->completed(), "ddp_hooks: expected a backend whose collectives complete on the host ",
              "once they are enqueued on a stream, received ", backend_name(group, device.type()),
              ", for which the host would have to wait; set Tuning.owners to False");
}

void when_back(const c10::intrusive_ptr<c10d::Work>& work, c10::Device device, std::shared_ptr<StepInFlight> step,
               OnSuccess on_success, OnEnd on_end) {
  *step->messages_not_back += 1;
  const c10::intrusive_ptr<c10::ivalue::Future> back = work->getFuture();
  // Where the future knows no streams, as gloo's, only the work does: what gloo copies back, its own thread's stream
  // waits for, but the completion may run in this thread.
  const bool knows_streams = device.is_cpu() || !back->devices().empty();
  back->addCallback([step = std::move(step), on_success = std::move(on_success), on_end = std::move(on_end), device,
                     waited = knows_streams ? c10::intrusive_ptr<c10d::Work>() : work](c10::ivalue::Future& future) {
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::make_optional(device));
    std::exception_ptr error = future.hasError() ? future.exception_ptr() : nullptr;
    if (!error) {
      try {
        if (waited) waited->synchronize();
        on_success(future);
        // Before a bucket completes, since the next step may begin then.
        *step->messages_not_back -= 1;
      } catch (...) {
        error = std::current_exception();
      }
    }
    on_end(error);
  });
}

void when_back(const c10::intrusive_ptr<c10d::Work>& work, c10::Device device, const Launch& launch,
               OnSuccess on_success) {
  when_back(
      work, device, launch.step,
      [step = launch.step, on_success = std::move(on_success)](c10::ivalue::Future& future) {
        if (!step->has_failed) on_success(future);
      },
      [launch](const std::exception_ptr& error) { end_message(launch, error); });
}

void end_message(const Launch& launch, const std::exception_ptr& error) {
  // Before a bucket fails, since the next step may begin then.
  if (error) launch.step->has_failed = true;
  for (BucketInFlight* bucket : launch.buckets) error ? bucket->fail(error) : bucket->message_done();
  if (launch.ended) launch.ended(error);
}

void gather(const at::Tensor& to, const std::vector<BorrowedSlice>& from, double divisor, bool divides) {
  RECORD_FUNCTION("ddp_hooks::gather", std::vector<c10::IValue>());
  divides ? gather_divided(to, from, divisor) : gather_scaled(to, from, 1 / divisor);
}

MessageStatistics& MessageStatistics::operator+=(const MessageStatistics& other) {
  for (const auto field :
       {&MessageStatistics::buckets_whole, &MessageStatistics::buckets_packed, &MessageStatistics::buckets_skipped,
        &MessageStatistics::messages, &MessageStatistics::payload_bytes, &MessageStatistics::broadcast_bytes,
        &MessageStatistics::owner_bytes, &MessageStatistics::coded_bytes, &MessageStatistics::uncoded_bytes,
        &MessageStatistics::size_bytes, &MessageStatistics::sent_bytes}) {
    this->*field += other.*field;
  }
  return *this;
}

void keep_for_stream(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_cpu()) tensor.record_stream(current_stream(tensor.device()));
}

}  // namespace ddp_hooks
