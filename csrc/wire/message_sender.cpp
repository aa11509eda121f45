#include "wire/message_sender.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "kernels/devices.h"

namespace ddp_hooks {
namespace {

// Completions on a device run on a stream of their own; memory that they read may not be reused before they have.
void keep_for_stream(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) tensor.record_stream(current_stream(tensor.device()));
}

void gather(const at::Tensor& to, const std::vector<SliceOfTensor>& from, double divisor, bool divides) {
  RECORD_FUNCTION("ddp_hooks::gather", std::vector<c10::IValue>());
  divides ? gather_divided(to, from, divisor) : gather_scaled(to, from, 1 / divisor);
}

// Not `mul_` with a Scalar: ATen makes that the first factor, and rounds it to the tensor's dtype on the CPU. In 16
// bits, all gradients would be off by what 1/n is.
void scale(at::Tensor run, double divisor, bool divides) {
  if (divisor == 1) return;
  divides ? run.div_(divisor) : at::mul_out(run, run, at::native::wrapped_scalar_tensor(1 / divisor));
}

// Joins what lies next to each other, so that a copy is as long as can be.
void append(std::vector<SliceOfTensor>& slices, const SliceOfTensor& slice) {
  if (!slices.empty()) {
    SliceOfTensor& last = slices.back();
    if (last.flat.is_same(slice.flat) && last.offset + last.length == slice.offset) {
      last.length += slice.length;
      return;
    }
  }
  slices.push_back(slice);
}

}  // namespace

int64_t payload_bytes(const at::Tensor& tensor) {
  if (!tensor.is_sparse()) return static_cast<int64_t>(tensor.nbytes());
  return static_cast<int64_t>(tensor._indices().nbytes() + tensor._values().nbytes());
}

void MessageSender::drop_staging() {
  staging_.clear();
}

void MessageSender::send(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout, uint32_t index,
                         const BucketPlan& plan, bool divided) {
  BucketInFlight& bucket = step->buckets[index];
  // Passes through even with nobody to send to: the all-reduce leaves it coalesced, as plain DDP does.
  const bool sparse = layout.buckets[index].sparse;
  bucket.expect_messages(plan.messages_touching + (sparse ? 1 : 0));
  const Disposition disposition = sparse ? Disposition::kWhole : divided ? Disposition::kPacked : plan.disposition;
  statistics_.buckets_skipped += disposition == Disposition::kSkipped;
  statistics_.buckets_packed += disposition == Disposition::kPacked;
  statistics_.buckets_whole += disposition == Disposition::kWhole;
  if (sparse) send_sparse(step, bucket);
  for (const Message& message : plan.launches) {
    if (message.in_place) {
      send_in_place(step, layout.buckets[message.slices.front().bucket], message);
    } else {
      send_packed(step, layout, message);
    }
  }
}

void MessageSender::send_units(const std::shared_ptr<StepInFlight>& step, uint32_t index,
                               const std::vector<DividedGradient>& gradients,
                               const std::vector<UnitMessage>& messages) {
  BucketInFlight& bucket = step->buckets[index];
  bucket.expect_messages(static_cast<int32_t>(messages.size()));
  for (const UnitMessage& message : messages) send_unit_message(step, bucket, gradients, message);
  bucket.release();
}

void MessageSender::send_unit_message(const std::shared_ptr<StepInFlight>& step, BucketInFlight& bucket,
                                      const std::vector<DividedGradient>& gradients, const UnitMessage& message) {
  const auto place = [&](const UnitRun& run) -> SliceOfTensor {
    const SliceOfTensor& gradient = gradients[run.gradient].gradient;
    return {gradient.flat, gradient.offset + run.offset, run.length};
  };
  if (message.in_place) {
    const UnitRun& run = message.runs.front();
    const SliceOfTensor slice = place(run);
    const at::Tensor view = slice.flat.narrow(0, slice.offset, slice.length);
    const auto [divisor, operation] = averaging(*step, view);
    scale(view, divisor, slots_.is_divided(gradients[run.gradient].parameter));
    all_reduce(view, operation, {step, {&bucket}}, [](c10::ivalue::Future&) {});
    return;
  }
  std::vector<SliceOfTensor> places;
  places.reserve(message.runs.size());
  for (const UnitRun& run : message.runs) places.push_back(place(run));
  const at::Tensor packed = staging_for(*step, message.numel, places.front().flat.options());
  // Runs of one gradient after the other; each gradient is scaled in its own way.
  int64_t position = 0;
  for (size_t first = 0; first < places.size();) {
    const size_t gradient = message.runs[first].gradient;
    const int64_t begin = position;
    size_t end = first;
    for (; end < places.size() && message.runs[end].gradient == gradient; ++end) position += places[end].length;
    gather(packed.narrow(0, begin, position - begin),
           {places.begin() + static_cast<std::ptrdiff_t>(first), places.begin() + static_cast<std::ptrdiff_t>(end)},
           step->divisor, slots_.is_divided(gradients[gradient].parameter));
    first = end;
  }
  all_reduce(packed, c10d::ReduceOp::SUM, {step, {&bucket}},
             [packed, places = std::move(places)](c10::ivalue::Future&) {
               RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
               scatter(packed, places);
               keep_for_stream(packed);
             });
}

void MessageSender::send_sparse(const std::shared_ptr<StepInFlight>& step, BucketInFlight& bucket) {
  at::Tensor gradient = bucket.buffer();
  gradient.div_(step->divisor);
  all_reduce(gradient, c10d::ReduceOp::SUM, {step, {&bucket}},
             [&bucket](c10::ivalue::Future& future) { bucket.set_result(future.value().toTensorVector().front()); });
}

void MessageSender::send_in_place(const std::shared_ptr<StepInFlight>& step, const BucketLayout& layout,
                                  const Message& message) {
  const Slice& slice = message.slices.front();
  BucketInFlight& bucket = step->buckets[slice.bucket];
  std::vector<std::pair<at::Tensor, at::Tensor>> gaps;
  for (const Slice& gap : message.gaps) {
    const at::Tensor unused = bucket.flat().narrow(0, gap.offset, gap.length);
    gaps.emplace_back(unused, unused.clone());
  }
  const at::Tensor view = bucket.flat().narrow(0, slice.offset, slice.length);
  const auto [divisor, operation] = averaging(*step, view);
  bring(*step, layout, slice, divisor);
  all_reduce(view, operation, {step, {&bucket}}, [gaps = std::move(gaps)](c10::ivalue::Future&) {
    for (const auto& [gap, content] : gaps) {
      gap.copy_(content);
      keep_for_stream(content);
    }
  });
}

// Brings the stretch's gradients into the bucket, scaled: neighbours that lie elsewhere in one copy, those that lie in
// the bucket already where they are.
void MessageSender::bring(const StepInFlight& step, const BucketLayout& layout, const Slice& stretch, double divisor) {
  enum class Way { kLeave, kScale, kGather };
  const at::Tensor flat = step.buckets[stretch.bucket].flat();
  int64_t begin = stretch.offset;
  int64_t end = begin;
  Way way = Way::kLeave;
  bool divides = false;
  std::vector<SliceOfTensor> sources;
  const auto finish_run = [&] {
    const at::Tensor run = flat.narrow(0, begin, end - begin);
    if (way == Way::kGather) gather(run, sources, divisor, divides);
    if (way == Way::kScale) scale(run, divisor, divides);
    sources.clear();
  };
  for (const ParameterSlice& slice : parameters_in(layout, stretch)) {
    at::Tensor gradient;
    Way next = Way::kLeave;
    if (step.brought.test(slice.parameter)) {
      slots_.give_back(slice.parameter);
    } else if (step.agreed.test(slice.parameter)) {
      gradient = take_gradient(step, slice.parameter);
      next = gradient.defined() ? Way::kGather : Way::kScale;
    }
    const bool divides_next = slots_.is_divided(slice.parameter);
    if (next != way || divides_next != divides || slice.offset != end) {
      finish_run();
      way = next;
      divides = divides_next;
      begin = slice.offset;
    }
    end = slice.offset + slice.length;
    if (gradient.defined()) sources.push_back({gradient, 0, slice.length});
  }
  finish_run();
}

void MessageSender::bring_early(StepInFlight& step, size_t parameter) {
  if (!step.plan || !step.plan->in_place.test(parameter) || !slots_.is_vacant(parameter)) return;
  const at::Tensor gradient = slots_.find(parameter);
  if (!gradient.defined()) return;
  gather(slots_.place(parameter), {{gradient, 0, gradient.numel()}}, step.divisor, slots_.is_divided(parameter));
  step.brought.set(parameter);
}

// Gives the parameter's slot back. The gradient, flat, if it is to be taken from elsewhere; undefined if it lies in the
// bucket.
at::Tensor MessageSender::take_gradient(const StepInFlight& step, size_t parameter) {
  if (step.shadow || !slots_.is_vacant(parameter)) return {};
  at::Tensor gradient = slots_.find_or_fill(parameter);
  slots_.give_back(parameter);
  return gradient;
}

MessageSender::Averaging MessageSender::averaging(const StepInFlight& step, const at::Tensor& tensor) const {
  // Saves a pass over gradients that lie in the bucket already. NCCL's average multiplies with 1/n before it sums, as
  // we do, but with 1/n rounded to the tensor's dtype; in 16 bits that is off by more than the rounding of a product.
  // Decided by what was agreed, not by the factor, which a rank that has joined does not know.
  const bool divides = tensor.is_cuda() && tensor.element_size() >= 4 && step.nobody_joined &&
                       group_.getBackend(c10::kCUDA)->getBackendName() == "nccl";
  if (divides) return {1, c10d::ReduceOp::AVG};
  return {step.divisor, c10d::ReduceOp::SUM};
}

void MessageSender::send_packed(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout,
                                const Message& message) {
  struct Sources {
    std::vector<SliceOfTensor> slices;
    int64_t numel = 0;
    bool divides = false;
  };
  std::vector<Sources> sources;
  std::vector<SliceOfTensor> to;
  std::vector<BucketInFlight*> buckets;
  for (const Slice& slice : message.slices) {
    BucketInFlight* bucket = &step->buckets[slice.bucket];
    if (buckets.empty() || buckets.back() != bucket) buckets.push_back(bucket);
    const at::Tensor flat = bucket->flat();
    to.push_back({flat, slice.offset, slice.length});
    for (const ParameterSlice& part : parameters_in(layout.buckets[slice.bucket], slice)) {
      const bool divides = slots_.is_divided(part.parameter);
      if (sources.empty() || sources.back().divides != divides) sources.push_back({{}, 0, divides});
      Sources& from = sources.back();
      from.numel += part.length;
      const at::Tensor gradient = take_gradient(*step, part.parameter);
      if (gradient.defined()) {
        from.slices.push_back({gradient, 0, part.length});
      } else {
        append(from.slices, {flat, part.offset, part.length});
      }
    }
  }
  const at::Tensor packed = staging_for(*step, message.numel, to.front().flat.options());
  // Scaled on the way, so an average would save no pass here, and NCCL has fewer algorithms for it than for a sum.
  int64_t position = 0;
  for (const Sources& from : sources) {
    gather(packed.narrow(0, position, from.numel), from.slices, step->divisor, from.divides);
    position += from.numel;
  }
  all_reduce(packed, c10d::ReduceOp::SUM, {step, std::move(buckets)},
             [packed, to = std::move(to)](c10::ivalue::Future&) {
               RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
               scatter(packed, to);
               keep_for_stream(packed);
             });
}

at::Tensor MessageSender::staging_for(StepInFlight& step, int64_t numel, const at::TensorOptions& options) {
  if (step.next_staging == staging_.size()) staging_.emplace_back();
  at::Tensor& staging = staging_[step.next_staging++];
  if (!staging.defined() || staging.numel() < numel || staging.dtype() != options.dtype() ||
      staging.device() != options.device()) {
    staging = at::empty({numel}, options);
  }
  return staging.narrow(0, 0, numel);
}

// Runs `on_success` and then counts the message off on each of its buckets; a failed collective fails them instead.
// The step keeps the buckets alive; they are not looked up in it, because the engine may be adding to it meanwhile.
void MessageSender::all_reduce(const at::Tensor& tensor, c10d::ReduceOp operation, Launch launch,
                               OnSuccess on_success) {
  RECORD_FUNCTION("ddp_hooks::all_reduce", std::vector<c10::IValue>());
  statistics_.messages += 1;
  statistics_.payload_bytes += payload_bytes(tensor);
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(operation);
  group_.allreduce(tensors, options)
      ->getFuture()
      ->addCallback([launch = std::move(launch), on_success = std::move(on_success),
                     device = tensor.device()](c10::ivalue::Future& future) {
        const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::make_optional(device));
        std::exception_ptr error = future.hasError() ? future.exception_ptr() : nullptr;
        if (!error) {
          try {
            on_success(future);
          } catch (...) {
            error = std::current_exception();
          }
        }
        for (BucketInFlight* bucket : launch.buckets) {
          if (error) {
            bucket->fail(error);
          } else {
            bucket->message_done();
          }
        }
      });
}

}  // namespace ddp_hooks
